"""A cluster in memory behind ``kubectl.call``: it keeps objects, and does what a test plants.

What real servers do is tested in tests/labs/servers.
"""

import copy
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from samestep.errors import RunError
from samestep.launch import kubectl

Object = dict[str, Any]
SINCE = "2026-11-27T04:00:00Z"


class FakeKubectl:
    """Call it as ``kubectl.call``.

    Attributes:
        objects: by kind and name.
        done: the calls that changed something: their verb, and the names of the objects.
        before: called before each call with its verb and manifests; it may raise an error.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.done: list[tuple[str, list[str]]] = []
        self.before: Callable[[str, Sequence[Object]], None] = lambda verb, manifests: None

    def __call__(
        self, cfg: Any, *arguments: str, manifests: Sequence[Object] = (), **_: Any
    ) -> str:
        verb = arguments[0]
        if "--dry-run=server" in arguments:
            verb = "dry-run"
        self.before(verb, manifests)
        if verb == "get":
            return self.get(arguments[1:], manifests)
        if verb in ("create", "dry-run"):
            self.reject_existing(manifests)
        if verb == "create":
            return self.create(manifests)
        if verb == "patch":
            return self.patch(arguments, manifests)
        if verb == "delete":
            return self.delete(arguments[1], arguments[2:])
        return ""

    def put(self, kind: str, name: str, **labels: str) -> None:
        """Put an object into the cluster that someone else has made."""
        metadata = {"name": name, "labels": labels, "creationTimestamp": SINCE, "uid": name}
        self.objects[kind, name] = {"apiVersion": "v1", "kind": kind, "metadata": metadata}

    def get(self, arguments: Sequence[str], manifests: Sequence[Object]) -> str:
        if "--filename=-" in arguments:
            wanted = [(item["kind"], item["metadata"]["name"]) for item in manifests]
            found = [item for key, item in self.objects.items() if key in wanted]
            if len(found) == 1:
                return json.dumps(found[0])
            return json.dumps({"kind": "List", "items": found})
        kind, _, name = arguments[0].partition("/")
        name = name or arguments[1]
        if name.startswith("--selector="):
            found = self.select(kind, name)
            return json.dumps({"kind": "List", "items": found})
        found = [item for item in self.select(kind) if item["metadata"]["name"] == name]
        return json.dumps(found[0]) if found else ""

    def select(self, kinds: str, selector: str = "") -> list[Object]:
        """The objects of these kinds with these labels."""
        names = {kind.partition(".")[0].removesuffix("s") for kind in kinds.split(",")}
        labels = dict(re.findall(r"([\w/]+)=([\w-]+)", selector.removeprefix("--selector=")))
        return [
            item
            for (kind, _), item in self.objects.items()
            if kind.lower().removesuffix("s") in names
            and labels.items() <= item["metadata"]["labels"].items()
        ]

    def reject_existing(self, manifests: Sequence[Object]) -> None:
        for item in manifests:
            key = (item["kind"], item["metadata"]["name"])
            if key in self.objects:
                raise kubectl.AlreadyExistsError(f"{key} already exists")

    def create(self, manifests: Sequence[Object]) -> str:
        for item in manifests:
            key = (item["kind"], item["metadata"]["name"])
            noted = {"kubectl.kubernetes.io/last-applied-configuration": json.dumps(item)}
            item = copy.deepcopy(item)
            item["metadata"] |= {"creationTimestamp": SINCE, "uid": f"uid of {key}"}
            item["metadata"]["annotations"] |= noted
            self.objects[key] = item
        return self.note("created", manifests)

    def patch(self, arguments: Sequence[str], manifests: Sequence[Object]) -> str:
        (patch,) = [word for word in arguments if word.startswith("--patch=")]
        for item in manifests:
            found = self.objects[item["kind"], item["metadata"]["name"]]
            found["metadata"] |= json.loads(patch.removeprefix("--patch="))["metadata"]
        return self.note("patched", manifests)

    def delete(self, kinds: str, arguments: Sequence[str]) -> str:
        (selector,) = [word for word in arguments if word.startswith("--selector=")]
        found = self.select(kinds, selector)
        for item in found:
            del self.objects[item["kind"], item["metadata"]["name"]]
        return self.note("deleted", found)

    def note(self, verb: str, items: Sequence[Object]) -> str:
        names = [f"{item['kind']}/{item['metadata']['name']}" for item in items]
        self.done.append((verb, names))
        return "".join(f"{name} {verb}\n" for name in names)


def failing(verb: str, kind: str, message: str) -> Callable[[str, Sequence[Object]], None]:
    """What ``before`` must be so that a call for objects of this kind fails."""

    def before(called: str, manifests: Sequence[Object]) -> None:
        if called == verb and kind in [item["kind"] for item in manifests]:
            raise RunError(message)

    return before
