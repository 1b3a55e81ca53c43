"""What the API server demands of a pod, or of a template of pods, beyond its schema.

Source: Kubernetes 1.36, pkg/apis/core/validation/validation.go. Only fields that our manifests use,
or that a key of the configuration can fill.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from samestep.launch.check.names import (
    DOMAIN,
    DOMAIN_RULE,
    LABEL,
    NAMESPACE,
    NAMESPACE_RULE,
    is_key,
)
from samestep.launch.check.quantities import parse_quantity
from samestep.launch.render import Document

VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
PORT_NAME = re.compile(r"(?=.{1,15}$)(?=.*[a-z])[a-z0-9]+(-[a-z0-9]+)*")
MOST_PORT = 65_535
MOST_USER = 2**31 - 1
LOCAL_EXTRAS = ("cpu", "memory", "ephemeral-storage")  # a request may be below their limit


def check_pod(pod: Document, path: str) -> Iterator[str]:
    """Yield the mistakes in a pod, or in the pod template at ``path``."""
    spec = pod["spec"]
    place = f"{path}.spec".lstrip(".")
    for check in (
        check_unique_names, check_mounts, check_references, check_subdomain, check_numbers,
        check_tolerations,
    ):  # fmt: skip
        yield from (f"{place}{fault}" for fault in check(spec))
    for group in ("containers", "initContainers"):
        for number, container in enumerate(spec.get(group, ())):
            for check_part in (check_variables, check_ports, check_resources):
                yield from (f"{place}.{group}[{number}]{fault}" for fault in check_part(container))


def check_unique_names(spec: Document) -> Iterator[str]:
    """Containers have names of their own, and so have volumes."""
    containers = spec["containers"] + spec.get("initContainers", [])
    for key, items in {"containers": containers, "volumes": spec.get("volumes", [])}.items():
        names = [item["name"] for item in items]
        yield from (f".{key}: two have the name {name}" for name in find_repeated(names))
        for name in names:
            if not NAMESPACE.fullmatch(name):
                yield f".{key}: the name {name} must be {NAMESPACE_RULE}"


def check_mounts(spec: Document) -> Iterator[str]:
    """A container mounts volumes of the pod, each at a place of its own."""
    volumes = [volume["name"] for volume in spec.get("volumes", ())]
    for number, container in enumerate(spec["containers"]):
        place = f".containers[{number}].volumeMounts"
        mounts = container.get("volumeMounts", [])
        for mount in mounts:
            if mount["name"] not in volumes:
                yield f"{place}: the pod has no volume {mount['name']}; it has {', '.join(volumes)}"
            if (sub := mount.get("subPath", "")).startswith("/") or ".." in sub.split("/"):
                yield f"{place}: subPath={sub} must be a path below the volume, without .."
        paths = [mount["mountPath"] for mount in mounts]
        yield from (f"{place}: two are at {folder}" for folder in find_repeated(paths))


def check_references(spec: Document) -> Iterator[str]:
    """Names of other objects have the form of names."""
    named = {"priorityClassName": spec.get("priorityClassName")}
    for number, secret in enumerate(spec.get("imagePullSecrets", ())):
        named[f"imagePullSecrets[{number}].name"] = secret.get("name")
    for number, volume in enumerate(spec.get("volumes", ())):
        claim = volume.get("persistentVolumeClaim", {})
        named[f"volumes[{number}].persistentVolumeClaim.claimName"] = claim.get("claimName")
    for number, container in enumerate(spec["containers"]):
        for at, source in enumerate(container.get("envFrom", ())):
            secret = source.get("secretRef", {})
            named[f"containers[{number}].envFrom[{at}].secretRef.name"] = secret.get("name")
    for key, name in named.items():
        if name is not None and not DOMAIN.fullmatch(name):
            yield f".{key}={name}: must be {DOMAIN_RULE}"


def check_subdomain(spec: Document) -> Iterator[str]:
    """The subdomain is the name of a Service."""
    name = spec.get("subdomain")
    if name is not None and not NAMESPACE.fullmatch(name):
        yield f".subdomain={name}: must be {NAMESPACE_RULE}"


def check_numbers(spec: Document) -> Iterator[str]:
    """Seconds and users are not negative."""
    seconds = spec.get("terminationGracePeriodSeconds", 0)
    if seconds < 0:
        yield f".terminationGracePeriodSeconds={seconds}: must be at least 0"
    for key in ("runAsUser", "runAsGroup", "fsGroup"):
        user = spec.get("securityContext", {}).get(key, 0)
        if not 0 <= user <= MOST_USER:
            yield f".securityContext.{key}={user}: must be from 0 to {MOST_USER}"


def check_tolerations(spec: Document) -> Iterator[str]:
    """A toleration names a taint in a form that the server knows."""
    for number, item in enumerate(spec.get("tolerations", ())):
        place = f".tolerations[{number}]"
        key, value, operator = item.get("key"), item.get("value"), item.get("operator", "Equal")
        if key and not is_key(key):
            yield f"{place}.key={key}: is not the key of a taint"
        if not key and operator != "Exists":
            yield f"{place}.key: is missing; only operator: Exists goes without it"
        if operator == "Exists" and value:
            yield f"{place}.value={value}: must be left out with operator: Exists"
        if value and not LABEL.fullmatch(value):
            yield f"{place}.value={value}: is not the value of a taint"
        if "tolerationSeconds" in item and item.get("effect") != "NoExecute":
            yield f"{place}.tolerationSeconds: needs effect: NoExecute"


def check_variables(container: Document) -> Iterator[str]:
    """A variable has a name that a shell knows, and one source."""
    for number, variable in enumerate(container.get("env", ())):
        name = variable["name"]
        if not VARIABLE.fullmatch(name):
            yield f".env[{number}].name={name}: must be of A-Z a-z 0-9 _ - ., the first no digit"
        if variable.get("value") and "valueFrom" in variable:
            yield f".env[{number}]: {name} must have a value or valueFrom, not both"


def check_ports(container: Document) -> Iterator[str]:
    """Ports have numbers that exist, and names of their own."""
    ports = container.get("ports", [])
    for number, port in enumerate(ports):
        yield from check_port(f".ports[{number}].containerPort", port["containerPort"])
        name = port.get("name")
        if name is not None and not PORT_NAME.fullmatch(name):
            yield f".ports[{number}].name={name}: must be at most 15 of a-z 0-9 -"
    names = [port["name"] for port in ports if "name" in port]
    yield from (f".ports: two have the name {name}" for name in find_repeated(names))


def check_port(place: str, number: Any) -> Iterator[str]:
    """A number of a port is from 1 to 65535; a name of a port is not judged."""
    if isinstance(number, int) and not 1 <= number <= MOST_PORT:
        yield f"{place}={number}: must be from 1 to {MOST_PORT}"


def check_resources(container: Document) -> Iterator[str]:
    """A request is at most its limit; devices are whole, and their request is their limit."""
    resources = container.get("resources", {})
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    for kind in ("limits", "requests"):
        for key, value in resources.get(kind, {}).items():
            amount = parse_quantity(value)
            assert amount is not None  # the schema has confirmed it
            place = f".resources.{kind}[{key}]={value}"
            if amount < 0:
                yield f"{place}: must be at least 0"
            if key not in LOCAL_EXTRAS and amount % 1:
                yield f"{place}: must be a whole number"
    for key, value in requests.items():
        yield from check_request(key, value, limits)


def check_request(key: str, value: Any, limits: Document) -> Iterator[str]:
    """A request fits its limit."""
    place = f".resources.requests[{key}]={value}"
    is_local = key in LOCAL_EXTRAS
    if key not in limits:
        if not is_local:
            yield f"{place}: needs the same limit"
        return
    request, limit = parse_quantity(value), parse_quantity(limits[key])
    assert request is not None
    assert limit is not None
    if request > limit:
        yield f"{place}: must be at most its limit {limits[key]}"
    elif request < limit and not is_local:
        yield f"{place}: must be its limit {limits[key]}"


def find_repeated(names: Iterable[str]) -> list[str]:
    """The names that stand there more than once, each once."""
    names = list(names)
    return sorted({name for name in names if names.count(name) > 1})
