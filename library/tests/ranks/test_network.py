import json
import shutil
import socket
import subprocess

import pytest

from samestep.ranks import network


def test_the_address_towards_a_node_is_one_of_this_node(monkeypatch: pytest.MonkeyPatch):
    own = network.address_towards("127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((own, 0))  # the kernel refuses the addresses of others
    assert network.address_towards(own) == own
    monkeypatch.setattr(network, "OUTSIDE_ADDRESS", "255.255.255.255")  # no way out of here
    assert network.address_towards("127.0.1.1") == "127.0.1.1"
    with pytest.raises(OSError, match=r"denied|unreachable"):
        network.address_towards("255.255.255.255")


@pytest.mark.program
@pytest.mark.skipif(shutil.which("ip") is None, reason="needs iproute2")
@pytest.mark.parametrize("address", ["203.0.113.1", "127.0.1.1", None])
def test_the_interface_is_the_one_that_the_kernel_chooses(address: str | None):
    route = json.loads(subprocess.check_output(["ip", "-j", "-4", "route", "get", "203.0.113.1"]))
    own = network.address_towards(address or route[0]["prefsrc"])
    assert network.interface_with(own) == route[0]["dev"]
    assert network.interface_with("203.0.113.1") is network.interface_with("::1") is None


def test_a_server_that_is_late_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert not network.answers("127.0.0.1", port)
        monkeypatch.setattr(network.time, "sleep", lambda seconds: server.listen())
        told: list[str] = []
        address, _ = network.wait_for("127.0.0.1", 60, told.append, port)
        assert (address, told) == ("127.0.0.1", ["Connection refused"])
        assert network.answers("127.0.0.1", port)


def test_a_server_that_never_comes_is_one_error():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        with pytest.raises(network.NetworkError) as caught:
            network.wait_for("127.0.0.1", 0.1, port=port)
    text = str(caught.value)
    assert text.startswith(f"127.0.0.1:{port} does not answer after 0.1 s (Connection refused). ")
    assert "--rdzv-conf=timeout=SECONDS waits longer" in text
