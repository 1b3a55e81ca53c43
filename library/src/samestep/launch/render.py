r"""Render the YAML files of k8s/ with the values of a configuration. Pure; imports no torch.

The files are templates. ``${key}`` in them is an interpolation of OmegaConf. It finds every key of
the configuration and also:

- ``${overrides}``: the overrides as they were typed, a list; ``${overrides_json}``: as JSON.
- ``${num_workers}``: the number of nodes without the first one.
- ``${pod.key}``: a part of ``k8s/pod.yaml``.

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

from samestep.hydra.nodes import escape, walk
from samestep.hydra.project import project_folder

WITHOUT_GPUS: dict[str, Any] = {
    "gpus": None,
    "gpu_options": None,
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
"""A manifest of YAML, such as the manifest of a Job; also an object that kubectl prints."""


def render(cfg: DictConfig, overrides: Sequence[str]) -> list[Manifest]:
    """Fill the manifests of ``k8s/<cluster.manifest>.yaml``, which is one file or several.

    The overrides reach train.py as they were typed.
    """
    names = cfg.cluster.manifest
    names = [names] if isinstance(names, str) else list(names)
    if cfg.cluster.get("volume_size") is not None:
        names = ["claim", *names]
    files = [project_folder() / f"k8s/{name}.yaml" for name in names]
    manifests = [manifest for file in files for manifest in yaml.safe_load_all(file.read_text())]
    escaped = [override.replace("$", "$$") for override in overrides]
    return [prune(manifest) for manifest in fill(manifests, find_values(cfg, escaped))]


def command(cfg: DictConfig, overrides: Sequence[str], action: str) -> list[str]:
    """The words of ``k8s/commands/<cluster.commands>.yaml`` for ``action``; none if it has none."""
    file = project_folder() / f"k8s/commands/{cfg.cluster.commands}.yaml"
    commands = yaml.safe_load(file.read_text())
    words = prune(fill(commands.get(action, []), find_values(cfg, overrides)))
    return [str(word) for word in words]


def uses_gpus(cfg: DictConfig) -> bool:
    """Whether the run asks a cluster for GPUs."""
    return cfg.trainer.accelerator in ("auto", "gpu")


def find_values(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Everything that an interpolation of a template may find."""
    values = OmegaConf.create(OmegaConf.to_container(cfg))
    assert isinstance(values, DictConfig)
    if not uses_gpus(cfg):
        for key in WITHOUT_GPUS.keys() & values.cluster.keys():
            values.cluster[key] = WITHOUT_GPUS[key]
    values.overrides = escape(list(overrides))
    values.overrides_json = escape(json.dumps(list(overrides)))
    values.num_workers = cfg.trainer.num_nodes - 1
    pod = project_folder() / "k8s/pod.yaml"
    if pod.exists():  # not in a copy of the template without Kubernetes
        values.pod = OmegaConf.load(pod)
    return values


def fill(node: Any, values: DictConfig) -> Any:
    """Replace the interpolations in ``node`` by their values, and repeat what has a ``for_each``.

    The keys ``each`` and ``node`` of ``values`` are overwritten.
    """
    if isinstance(node, list):
        return [copy for item in node for copy in _fill_copies(item, values)]
    if not isinstance(node, dict):
        values.node = node
        found = values.node
        return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
    filled: Manifest = {}
    for key, item in node.items():
        copies = _fill_copies(item, values)
        if _is_repeated(item):
            filled |= {f"{key}-{index}": copy for index, copy in enumerate(copies)}
        else:
            (filled[key],) = copies
    return filled


def prune(node: Any) -> Any:
    """Join lists within lists, and leave out what has no value; None if nothing is left.

    An empty node stays.
    """
    if not isinstance(node, (dict, list)) or not node:
        return node
    if isinstance(node, dict):
        pruned = {key: prune(value) for key, value in node.items()}
        return {key: value for key, value in pruned.items() if value is not None} or None
    items: list[Any] = []
    for value in map(prune, node):
        items += value if isinstance(value, list) else [value]
    return [item for item in items if item is not None] or None


def text(manifests: Sequence[Manifest]) -> str:
    """Write the manifests as one YAML file, a batch script, or lines for a shell."""
    if manifests and "sbatch" in manifests[0]:
        return batch_script(manifests[0])
    if not all("command" in manifest for manifest in manifests):
        return yaml.dump_all(manifests, Dumper=Dumper, sort_keys=False, width=1000)
    lines = []
    for manifest in manifests:
        words = [str(word).replace("$$", "$") for word in manifest["command"]]
        lines += [f"# {manifest['comment']}\n", f"{shlex.join(words)}\n"]
    return "".join(lines)


def batch_script(manifest: Manifest) -> str:
    """Write a script for Slurm: its options, the variables of ``k8s/slurm.sh``, and that file."""
    trials = manifest.get("trials") or []
    options = dict(manifest["sbatch"])
    options["export"] = ",".join(options["export"])
    if trials:
        options["array"] = f"0-{len(trials) - 1}"
        options["output"] = options["output"].replace("%x", "%x-%a")
    words = [f"--{key}" if value is True else f"--{key}={value}" for key, value in options.items()]
    command = [str(word).replace("$$", "$") for word in manifest["command"]]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {shlex.quote(str(word))}" for word in [*words, *manifest.get("options", ())]),
        f"restarts={manifest['restarts']}",
        f"trials=({shlex.join(trials)})",
        f"command=({shlex.join(command)})",
    ]
    return "\n".join(lines) + "\n" + (project_folder() / "k8s/slurm.sh").read_text()


def _is_repeated(node: Any) -> bool:
    return isinstance(node, dict) and "for_each" in node


def _fill_copies(node: Any, values: DictConfig) -> list[Any]:
    """Fill ``node`` once, or once for each item of its ``for_each``."""
    if not _is_repeated(node):
        return [fill(node, values)]
    body = {key: value for key, value in node.items() if key != "for_each"}
    ((name, items),) = node["for_each"].items()
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


def find_unprintable(cfg: DictConfig) -> Iterator[str]:
    """A line for each text of a cluster, and each path of a run, that is more than one line.

    They become lines of batch scripts. After a newline a shell would execute the rest, and a
    comment with Slurm's options ends there.
    """
    places = {key: cfg[key] for key in ("run_root", "run_dir") if key in cfg}
    places["cluster"] = OmegaConf.to_container(cfg.cluster, resolve=True)
    for path, node in walk(places):
        for text in [node] if isinstance(node, str) else node if isinstance(node, dict) else ():
            if not str(text).isprintable():
                yield (
                    f"{path}={json.dumps(text)}: must be one line without control characters; in "
                    "a YAML file write it beside its key, without | or >"
                )
