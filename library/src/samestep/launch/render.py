r"""Render the YAML files of k8s/ with the values of a configuration. Pure; imports no torch.

The files are templates. ``${key}`` in them is an interpolation of OmegaConf. It finds every key of
the configuration and also:

- ``${overrides}``: the overrides as they were typed, a list; ``${overrides_json}``: as JSON.
- ``${num_workers}``: the number of nodes without the first one.
- ``${failures_of_all}``: ``cluster.backoff_limit`` for each node, added up.
- ``${pod.key}``: a part of ``k8s/labels.yaml`` or ``k8s/pod.yaml``.

Three rules change the structure of a file:

1. Repeat. ``for_each: {name: list}`` in a mapping makes one copy of the mapping for each item of
   the list. In a copy ``${each.name}`` is the item, ``${each.index}`` its number from 0 and
   ``${each.count}`` the number of items. If the mapping has a key, the copies have the keys
   ``key-0``, ``key-1`` and so on.
2. Join. A list that is an item of a list is replaced by its items.
3. Leave out. A key or an item is left out if its value is null, or a mapping or list in which
   everything was left out.

Two escapes keep the overrides as they were typed: ``\${`` for OmegaConf, which would replace a
``${``, and ``$$`` for Kubernetes and Swarm, which would replace a ``$``.
"""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from samestep.hydra.nodes import as_list, escape, walk
from samestep.hydra.project import project_folder

WITHOUT_GPUS: dict[str, Any] = {
    "gpus": None,
    "gpu_kinds": [],
    "visible": "void",
}
"""Keys of ``cluster`` that give GPUs to a run, with their values for a run without GPUs."""

READ_OTHERWISE = re.compile(r"([yYnN]|[-+]?[.\d][\d_]*\.?[\d_]*([eE][-+]?\d+)?|0[ob][\d_]+)$")
"""Texts that kubectl's reader of YAML takes for true, false or a number, and PyYAML for text."""


class Dumper(yaml.SafeDumper):
    """Puts quotes around texts that another reader of YAML would take for something else."""


Dumper.add_implicit_resolver("tag:yaml.org,2002:bool", READ_OTHERWISE, list("yYnN+-.0123456789"))

Manifest = dict[str, Any]
"""A document of YAML, such as the manifest of a Job; also an object that kubectl prints."""


def render(cfg: DictConfig, overrides: Sequence[str]) -> list[Manifest]:
    """Fill the manifests of ``k8s/<cluster.manifest>.yaml``, which is one file or several.

    The overrides reach train.py as they were typed.
    """
    names = as_list(cfg.cluster.manifest)
    if cfg.cluster.get("volume_size") is not None:
        names = ["claim", *names]
    # Kubernetes and Swarm replace $(NAME) and $NAME in the arguments of a container.
    escaped = [override.replace("$", "$$") for override in overrides]
    values = find_values(cfg, escaped)
    manifests = []
    for name in names:
        file = project_folder() / f"k8s/{name}.yaml"
        for template in yaml.safe_load_all(file.read_text()):
            manifests += fill_copies(template, values)
    return [prune(manifest) for manifest in manifests]


def command(cfg: DictConfig, overrides: Sequence[str], action: str) -> list[str]:
    """Fill a command of ``k8s/commands/<cluster.commands>.yaml``; empty if it has none."""
    file = project_folder() / f"k8s/commands/{cfg.cluster.commands}.yaml"
    commands = yaml.safe_load(file.read_text())
    words = prune(fill(commands.get(action, []), find_values(cfg, overrides)))
    return [str(word) for word in words]


def uses_gpus(cfg: DictConfig) -> bool:
    """Whether the run asks a cluster for GPUs."""
    return cfg.trainer.accelerator in ("auto", "gpu")


def find_values(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Everything that an interpolation of a template may find."""
    # A copy: the keys below are for templates only.
    values = OmegaConf.create(OmegaConf.to_container(cfg))
    assert isinstance(values, DictConfig)
    if not uses_gpus(cfg):
        for key in WITHOUT_GPUS.keys() & values.cluster.keys():
            values.cluster[key] = WITHOUT_GPUS[key]
    values.overrides = escape(list(overrides))
    values.overrides_json = escape(json.dumps(list(overrides)))
    values.num_workers = cfg.trainer.num_nodes - 1
    # One incident may take all nodes at once.
    num_nodes = cfg.cluster.get("max_nodes", cfg.trainer.num_nodes)
    values.failures_of_all = cfg.cluster.get("backoff_limit", 0) * num_nodes
    values.pod = {}
    for name in ("labels", "pod"):
        file = project_folder() / f"k8s/{name}.yaml"
        # A copy of the template without Kubernetes has no pod, and an older copy has the labels in
        # the file of the pod.
        if file.exists():
            values.merge_with({"pod": OmegaConf.load(file)})
    return values


def fill(node: Any, values: DictConfig) -> Any:
    """Replace the interpolations in ``node`` by their values, and repeat what has a ``for_each``.

    The keys ``each`` and ``node`` of ``values`` are overwritten.
    """
    if isinstance(node, list):
        items: list[Any] = []
        for item in node:
            items += fill_copies(item, values)
        return items
    if isinstance(node, dict):
        return fill_mapping(node, values)
    # OmegaConf resolves an interpolation only where it stands in a configuration.
    values.node = node
    found = values.node
    if OmegaConf.is_config(found):
        return OmegaConf.to_container(found, resolve=True)
    return found


def fill_mapping(node: Manifest, values: DictConfig) -> Manifest:
    """Fill each value of a mapping; the copies of a repeated value have keys with numbers."""
    filled: Manifest = {}
    for key, item in node.items():
        copies = fill_copies(item, values)
        if not is_repeated(item):
            (filled[key],) = copies
            continue
        for index, copy in enumerate(copies):
            filled[f"{key}-{index}"] = copy
    return filled


def is_repeated(node: Any) -> bool:
    """Whether ``node`` is a mapping with a ``for_each``."""
    return isinstance(node, dict) and "for_each" in node


def fill_copies(node: Any, values: DictConfig) -> list[Any]:
    """Fill ``node`` once, or once for each item of its ``for_each``."""
    if not is_repeated(node):
        return [fill(node, values)]
    body = dict(node)
    ((name, items),) = body.pop("for_each").items()
    items = fill(items, values)

    # The body may use the item of a for_each around it, so that stays and comes back afterwards.
    outer = values.get("each", {})
    copies = []
    for index, item in enumerate(items):
        values.each = {**outer, name: item, "index": index, "count": len(items)}
        copies.append(fill(body, values))
    values.each = outer

    # Without items, a null takes the place of the copies, so that the list around it is left out.
    return copies or [None]


def prune(node: Any) -> Any:
    """Join lists within lists, and leave out what has no value; None if nothing is left.

    An empty node stays: someone wrote ``{}`` or ``[]`` in the template on purpose.
    """
    if not node:
        return node
    if isinstance(node, dict):
        return prune_mapping(node)
    if isinstance(node, list):
        return prune_list(node)
    return node


def prune_mapping(node: Manifest) -> Manifest | None:
    """Leave out the keys without a value; None if no key is left."""
    kept: Manifest = {}
    for key, value in node.items():
        pruned = prune(value)
        if pruned is not None:
            kept[key] = pruned
    return kept or None


def prune_list(node: list[Any]) -> list[Any] | None:
    """Join lists within a list, and leave out items without a value; None if no item is left."""
    kept: list[Any] = []
    for item in node:
        pruned = prune(item)
        if isinstance(pruned, list):
            kept += pruned
        elif pruned is not None:
            kept.append(pruned)
    return kept or None


def text(manifests: Sequence[Manifest]) -> str:
    """Write the manifests as one YAML file, or as a batch script."""
    keys = set().union(*manifests)
    if "sbatch" in keys:
        return batch_script(*manifests)
    return yaml.dump_all(manifests, Dumper=Dumper, sort_keys=False, width=1000)


def join_command(manifest: Manifest) -> str:
    """The command of a manifest for a shell."""
    # render has escaped the overrides for Kubernetes. A shell needs them as they were typed.
    words = [str(word).replace("$$", "$") for word in manifest["command"]]
    return shlex.join(words)


def batch_script(manifest: Manifest) -> str:
    """Write a script for Slurm: its options, the variables of ``k8s/slurm.sh``, and that file."""
    trials = manifest.get("trials", [])
    options = dict(manifest["sbatch"])
    options["export"] = ",".join(options["export"])
    if trials:
        options["array"] = f"0-{len(trials) - 1}"
        options["output"] = options["output"].replace("%x", "%x-%a")
    lines = ["#!/bin/bash"]
    for key, value in options.items():
        word = f"--{key}"
        if value is not True:
            word = f"--{key}={value}"
        lines.append(f"#SBATCH {shlex.quote(word)}")
    for word in manifest.get("options", ()):
        lines.append(f"#SBATCH {shlex.quote(str(word))}")
    lines += [
        f"restarts={manifest['restarts']}",
        f"trials=({shlex.join(trials)})",
        f"command=({join_command(manifest)})",
        (project_folder() / "k8s/slurm.sh").read_text(),
    ]
    return "\n".join(lines)


def find_unprintable(cfg: DictConfig) -> Iterator[str]:
    """A line for each text of a cluster, and each path of a run, that is more than one line."""
    # These texts become lines of batch scripts. After a newline a shell would execute the rest,
    # and a comment with Slurm's options ends there.
    places = {
        "run_root": cfg.get("run_root"),
        "run_dir": cfg.get("run_dir"),
        "cluster": OmegaConf.to_container(cfg.cluster, resolve=True),
    }
    for path, node in walk(places):
        # Of a mapping its keys, such as names of labels. What is no text is always printable.
        words = list(node) if isinstance(node, dict) else [node]
        for word in words:
            if not str(word).isprintable():
                yield (
                    f"{path}={json.dumps(word)}: must be one line without control characters; in "
                    "a YAML file write it beside its key, without | or >"
                )
