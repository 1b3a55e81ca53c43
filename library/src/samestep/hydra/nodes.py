"""Nodes and values of a configuration, by full keys such as ``model.optimizer.lr``. No torch."""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

Kind = TypeVar("Kind")


class Leaf(NamedTuple):
    """A value in a configuration: the node that contains it, its name there, and its text.

    ``text`` is the value as written: an interpolation such as ``${seed}`` is not resolved.
    """

    node: DictConfig
    name: str
    text: Any


def flatten(node: DictConfig, whole: Container[str] = (), prefix: str = "") -> dict[str, Leaf]:
    """The values below ``node`` by their full keys; a group at a key of ``whole`` is one value."""
    found: dict[str, Leaf] = {}
    content: Any = OmegaConf.to_container(node)
    for name, text in content.items():
        # A name may be a number, as in scheduling: {1: 3}. It may also contain dots, as names of
        # files do, so the leaf keeps its node instead of being looked up by the full key.
        key = f"{prefix}{name}"
        # A group without keys is a value: nothing below it would show that it exists.
        has_keys = isinstance(text, dict) and len(text) > 0
        if has_keys and key not in whole:
            found |= flatten(node[name], whole, f"{key}.")
        else:
            found[key] = Leaf(node, name, text)
    return found


def resolve(leaf: Leaf) -> Any:
    """The value as a run gets it; the error as a value if it cannot be resolved."""
    try:
        return resolve_or_raise(leaf)
    except OmegaConfBaseException as error:
        return error


def resolve_or_raise(leaf: Leaf) -> Any:
    """The value as a run gets it."""
    value = leaf.node[leaf.name]
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    return value


def walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``node`` and every value within it, each with its path."""
    yield path, node
    if isinstance(node, dict):
        for key, child in node.items():
            yield from walk(child, f"{path}.{key}".lstrip("."))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from walk(child, f"{path}[{index}]")


def map_values(value: Any, kind: type[Kind], change: Callable[[Kind], Any]) -> Any:
    """Copy plain containers, and change every value of one kind in them."""
    if isinstance(value, dict):
        return {key: map_values(item, kind, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_values(item, kind, change) for item in value]
    return change(value) if isinstance(value, kind) else value


def escape(value: Any) -> Any:
    """Copy plain containers so that OmegaConf returns every string unchanged."""

    def escape_text(text: str) -> str:
        # OmegaConf reads \${ as ${, and \\${ as a backslash before an interpolation.
        return re.sub(r"(\\*)\$\{", lambda match: rf"{match[1] * 2}\${{", text)

    return map_values(value, str, escape_text)


def with_text_paths(value: Any) -> Any:
    """Copy plain containers with each path as text, which YAML can hold in any process."""
    return map_values(value, PurePath, str)


def as_list(value: str | Sequence[str] | None) -> Sequence[str]:
    """A value that may be one text, a list of texts, or null, always as a list."""
    if isinstance(value, str):
        return [value]
    return value or []


def nodes_of(keys: Iterable[str]) -> set[str]:
    """The keys of all nodes above these keys."""
    found: set[str] = set()
    for key in keys:
        found.update(parents_of(key))
    return found


def parents_of(key: str) -> list[str]:
    """The keys of the nodes above ``key``, the highest first: of ``a.b.c``, ``a`` and ``a.b``."""
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def parent_of(key: str) -> str:
    """The key of the node that contains ``key``; empty at the top."""
    return key.rpartition(".")[0]


def is_below(key: str, nodes: Container[str]) -> bool:
    """Whether ``key`` is one of the nodes, or below one."""
    return any(node in nodes for node in (*parents_of(key), key))
