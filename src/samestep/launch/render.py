"""Manifests: the YAML files of k8s/ with the values of a configuration. Pure; imports no torch."""

import json
import re
import shlex
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

K8S = Path(__file__).parents[3] / "k8s"

Document = dict[str, Any]

# Run:ai counts the nodes beside the first one; OmegaConf does not count.
OmegaConf.register_new_resolver("minus_one", lambda number: number - 1, replace=True)


def render(cfg: DictConfig, overrides: Sequence[str]) -> list[Document]:
    """The documents of ``k8s/<cluster.manifest>.yaml``, without what has no value.

    Their interpolations see all of ``cfg``, the ``overrides``, and as ``pod`` what is in
    ``k8s/pod.yaml``. Four rules:

    - ``for_each: {name: list}`` in a mapping makes one of it for each item, with the item as
      ``${each.name}``, its number from 0 as ``${each.index}``, their number as ``${each.count}``;
      the mapping's key becomes ``key-0``, ``key-1`` and so on.
    - A key or item whose value is null is left out.
    - So is what becomes empty by that.
    - A list that is an item of a list gives its items to it.

    Args:
        cfg: composed for a cluster; its ``run_id`` is set.
        overrides: of train.py, as typed; they reach it unchanged.

    Raises:
        OmegaConfBaseException: if a value has no home in the configuration.
    """
    names = cfg.cluster.manifest  # of one file, or of several
    files = [K8S / f"{name}.yaml" for name in ([names] if isinstance(names, str) else names)]
    documents = [document for file in files for document in yaml.safe_load_all(file.read_text())]
    # Kubernetes and Swarm put variables in place of $(NAME) and $NAME, and one $ in place of $$.
    words = [word.replace("$", "$$") for word in overrides]
    return [_pruned(document) for document in resolve(cfg, words, documents)]


def command(cfg: DictConfig, overrides: Sequence[str], action: str) -> list[str]:
    """That of ``k8s/commands/<cluster.commands>.yaml`` for this action; empty without one."""
    commands = yaml.safe_load((K8S / "commands" / f"{cfg.cluster.commands}.yaml").read_text())
    return [str(word) for word in _pruned(resolve(cfg, overrides, commands.get(action, [])))]


def resolve(cfg: DictConfig, overrides: Sequence[str], node: Any) -> Any:
    """``node`` with the value of each interpolation in it."""
    root: DictConfig = OmegaConf.create(deepcopy(OmegaConf.to_container(cfg)))  # type: ignore[assignment]
    root.overrides = [_literal(word) for word in overrides]
    root.overrides_json = _literal(json.dumps(list(overrides)))
    root.pod = OmegaConf.load(K8S / "pod.yaml")
    return _filled(node, root)


def text(documents: Sequence[Document]) -> str:
    """The documents as one YAML file; those that are commands as lines for a shell."""
    if all("command" in document for document in documents):
        return "".join(
            f"# {document['comment']}\n"
            + shlex.join(str(word).replace("$$", "$") for word in document["command"])
            + "\n"
            for document in documents
        )
    return yaml.safe_dump_all(documents, sort_keys=False, width=1000)


def _filled(node: Any, root: DictConfig) -> Any:
    """``node`` with the values that ``root`` has for it, and one of each ``for_each``."""
    if isinstance(node, list):
        return [copy for item in node for copy in _copies(item, root)]
    if isinstance(node, dict):
        return {
            f"{key}-{index}" if isinstance(item, dict) and "for_each" in item else key: copy
            for key, item in node.items()
            for index, copy in enumerate(_copies(item, root))
        }
    root.node = node
    value = root.node
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _copies(node: Any, root: DictConfig) -> list[Any]:
    """``node``, filled; or as often as its ``for_each`` says."""
    if not (isinstance(node, dict) and "for_each" in node):
        return [_filled(node, root)]
    body, outer, copies = dict(node), root.get("each", {}), []
    ((name, items),) = body.pop("for_each").items()
    values = _filled(items, root)
    for index, item in enumerate(values):
        root.each = {**outer, name: item, "index": index, "count": len(values)}
        copies.append(_filled(body, root))
    root.each = outer
    return copies or [None]


def _literal(word: str) -> str:
    """``word``, so that its ``${`` is no interpolation of a manifest: it is one of train.py."""
    return re.sub(r"(\\*)\$\{", lambda match: rf"{match[1] * 2}\${{", word)


def _pruned(node: Any) -> Any:
    """``node`` without what has no value; null where nothing is left."""
    if isinstance(node, dict):
        kept = {key: value for key, old in node.items() if (value := _pruned(old)) is not None}
        return kept if kept or not node else None
    if isinstance(node, list):
        items: list[Any] = []
        for old in node:
            item = _pruned(old)
            items += item if isinstance(item, list) else [item]
        kept_items = [item for item in items if item is not None]
        return kept_items if kept_items or not node else None
    return node
