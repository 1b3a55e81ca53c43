"""What the API server demands of Services and NetworkPolicies beyond their schemas.

Source: Kubernetes 1.36, pkg/apis/core/validation and pkg/apis/networking/validation.
"""

from collections.abc import Iterator

from samestep.launch.check.names import NAME, NAME_RULE, NAMESPACE, NAMESPACE_RULE
from samestep.launch.check.pods import check_port, find_repeated
from samestep.launch.render import Document

DIRECTIONS = {"ingress": "from", "egress": "to"}


def check_service(service: Document) -> Iterator[str]:
    """Yield the mistakes in a Service: its name is a name in DNS, its ports differ."""
    name, spec = service["metadata"]["name"], service["spec"]
    if not NAME.fullmatch(name):
        yield f"metadata.name={name}: a Service must have {NAME_RULE}"
    ports = spec.get("ports", [])
    is_headless = spec.get("clusterIP") == "None"
    if not ports and not is_headless and spec.get("type") != "ExternalName":
        yield "spec.ports: is missing; only a Service with clusterIP: None goes without"
    if is_headless and spec.get("type", "ClusterIP") != "ClusterIP":
        yield f"spec.type={spec['type']}: must be ClusterIP beside clusterIP: None"
    for number, port in enumerate(ports):
        place = f"spec.ports[{number}]"
        yield from check_port(f"{place}.port", port["port"])
        yield from check_port(f"{place}.targetPort", port.get("targetPort"))
        name = port.get("name")
        if name is None and len(ports) > 1:
            yield f"{place}.name: is missing; several ports need names"
        if name is not None and not NAMESPACE.fullmatch(name):
            yield f"{place}.name={name}: must be {NAMESPACE_RULE}"
    names = [port["name"] for port in ports if "name" in port]
    yield from (f"spec.ports: two have the name {name}" for name in find_repeated(names))


def check_network_policy(policy: Document) -> Iterator[str]:
    """Yield the mistakes in a NetworkPolicy: each rule names peers, and each direction exists."""
    spec = policy["spec"]
    for kind in spec.get("policyTypes", ()):
        if kind not in ("Ingress", "Egress"):
            yield f"spec.policyTypes: {kind} must be Ingress or Egress"
    for direction, key in DIRECTIONS.items():
        for number, rule in enumerate(spec.get(direction, ())):
            place = f"spec.{direction}[{number}]"
            for at, peer in enumerate(rule.get(key, ())):
                yield from check_peer(f"{place}.{key}[{at}]", peer)
            for at, port in enumerate(rule.get("ports", ())):
                yield from check_policy_port(f"{place}.ports[{at}]", port)


def check_peer(place: str, peer: Document) -> Iterator[str]:
    """A peer is pods, namespaces, both, or a block of addresses."""
    if not peer.keys() & {"podSelector", "namespaceSelector", "ipBlock"}:
        yield f"{place}: must have podSelector, namespaceSelector or ipBlock"
    elif "ipBlock" in peer and len(peer) > 1:
        yield f"{place}: must have nothing beside ipBlock"


def check_policy_port(place: str, port: Document) -> Iterator[str]:
    """A port exists, and a range of ports goes up."""
    first, last = port.get("port"), port.get("endPort")
    yield from check_port(f"{place}.port", first)
    yield from check_port(f"{place}.endPort", last)
    if last is not None and (not isinstance(first, int) or last < first):
        yield f"{place}.endPort={last}: needs a number in port, which is at most as great"
