"""Walk through a document: every value in it, and every pod."""

from collections.abc import Iterable, Iterator
from typing import Any

from samestep.launch.render import Document


def walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``node`` and every value within it, each with its path."""
    yield path, node
    children: Iterable[tuple[str | int, Any]] = ()
    if isinstance(node, dict):
        children = node.items()
    elif isinstance(node, list):
        children = enumerate(node)
    for key, child in children:
        yield from walk(child, join_path(path, [key]))


def walk_mappings(document: Document) -> Iterator[tuple[str, Document]]:
    """Yield every mapping in ``document``, itself included, each with its path."""
    for path, node in walk(document):
        if isinstance(node, dict):
            yield path, node


def join_path(path: str, keys: Iterable[str | int]) -> str:
    """Append keys of mappings and indices of lists to ``path``: ``spec.containers[0].name``."""
    for key in keys:
        path += f"[{key}]" if isinstance(key, int) else f".{key}"
    return path.lstrip(".")


def find_pods(document: Document) -> Iterator[tuple[str, Document]]:
    """Yield every pod and pod template in ``document``, each with its path.

    The ``runtimePatches`` of a TrainJob are left out: they change a pod and need not be a whole
    one.
    """
    for path, node in walk_mappings(document):
        spec = node.get("spec")
        is_pod = isinstance(spec, dict) and isinstance(spec.get("containers"), list)
        if is_pod and "runtimePatches" not in path:
            yield path, node
