"""Mistakes in Services and NetworkPolicies that the API server finds by code."""

import pytest

from tests.samestep.launch.check.planting import refused

PEERS = "NetworkPolicy:spec.ingress[0].from"
PORTS = "NetworkPolicy:spec.ingress[0].ports"
PLANTED = [
    ("Service:metadata.name", "1-run", "metadata.name=1-run: a Service must have at most 63 of"),
    ("Service:metadata.name", "a" * 64, "a Service must have at most 63 of a-z 0-9 -"),
    ("Service:spec.ports[0].port", 0, "spec.ports[0].port=0: must be from 1 to 65535"),
    ("Service:spec.ports[0].targetPort", 70_000, "targetPort=70000: must be from 1 to 65535"),
    ("Service:spec.ports[0].name", "A", "spec.ports[0].name=A: must be at most 63 of a-z"),
    ("Service:spec.ports[1]", {"port": 1}, "spec.ports[1].name: is missing; several ports need"),
    ("Service:spec.ports[1]", {"port": 1, "name": "rendezvous"}, "two have the name rendezvous"),
    ("Service:spec.type", "NodePort", "spec.type=NodePort: must be ClusterIP beside clusterIP"),
    ("NetworkPolicy:spec.policyTypes", ["ingress"], "ingress must be Ingress or Egress"),
    (f"{PEERS}[0]", {}, "from[0]: must have podSelector, namespaceSelector or ipBlock"),
    (f"{PEERS}[0].ipBlock", {"cidr": "10.0.0.0/8"}, "must have nothing beside ipBlock"),
    (PORTS, [{"port": 0}], "ingress[0].ports[0].port=0: must be from 1 to 65535"),
    (PORTS, [{"port": 9, "endPort": 8}], "ports[0].endPort=8: needs a number in port"),
    (PORTS, [{"port": "http", "endPort": 8}], "ports[0].endPort=8: needs a number in port"),
]


@pytest.mark.parametrize(("place", "value", "message"), PLANTED)
def test_a_mistake_in_the_network_is_found(place, value, message):
    (fault,) = refused(**{place: value})
    assert message in fault


def test_a_service_with_an_address_needs_ports():
    planted = {"Service:spec.clusterIP": None, "Service:spec.ports": None}
    (fault,) = refused(**planted)
    assert fault.startswith("spec.ports: is missing")
    assert refused(**{"Service:spec.ports": None}) == []
