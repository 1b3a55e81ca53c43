"""The restricted Pod Security Standard of Kubernetes: pod_security.yaml, applied to a pod."""

from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator

from samestep.hydra.schema import show
from samestep.launch.check.documents import join_path
from samestep.launch.render import Document

SCHEMA = Path(__file__).with_name("pod_security.yaml")
CONTAINERS = ("containers", "initContainers", "ephemeralContainers")


def check_pod_security(pod: Document, path: str) -> Iterator[str]:
    """Yield every field of the pod, or the pod template at ``path``, that breaks the standard."""
    for error in load_validator().iter_errors(state_effective_values(pod)):
        place = join_path(path, error.absolute_path)
        value = "" if error.instance is None else f"={show(error.instance)}"
        control, rule = error.schema["title"], error.schema["description"]
        yield f"{place}{value}: {rule} (Pod Security Standard, {control})"


@cache
def load_validator() -> Any:
    """A validator of pods for the schema in pod_security.yaml."""
    return Draft7Validator(yaml.safe_load(SCHEMA.read_text()))


def state_effective_values(pod: Document) -> Document:
    """Copy ``pod`` and write into each container the values that are in force for it.

    A container inherits two fields from its pod. A field that neither of them sets becomes null
    or empty: the standard demands a value, and the schema then refuses it by the field's own rule.
    """
    pod = deepcopy(pod)
    inherited = pod["spec"].get("securityContext", {})
    containers = [item for group in CONTAINERS for item in pod["spec"].get(group, ())]
    for container in containers:
        own = container.get("securityContext", {})
        container["securityContext"] = {
            "allowPrivilegeEscalation": None,
            "runAsNonRoot": inherited.get("runAsNonRoot"),
            "seccompProfile": inherited.get("seccompProfile", {"type": None}),
            **own,
            "capabilities": {"drop": [], **own.get("capabilities", {})},
        }
    return pod
