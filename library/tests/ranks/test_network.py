import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from samestep.errors import ConfigError
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


def test_interfaces_are_those_with_an_address():
    found = network.interfaces()
    assert "lo" in found
    assert set(found) <= {name for _, name in socket.if_nameindex()}


def test_an_interface_is_not_rejected_where_addresses_are_not_known(
    monkeypatch: pytest.MonkeyPatch,
):
    """As on macOS, which has other requests than Linux."""
    monkeypatch.setattr(network, "SIOCGIFADDR", 0)
    monkeypatch.setattr(network, "Path", lambda path: Path("/nowhere"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    network.check_chosen_interfaces(uses_nccl=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "en9")
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME=en9: names no network interface"):
        network.check_chosen_interfaces(uses_nccl=False)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("eth", ["eth0", "eth01"]),
        ("=eth0", ["eth0"]),
        ("ib,lo", ["ib0", "lo"]),
        ("^lo", ["eth0", "eth01", "ib0"]),
        ("^=eth0", ["eth01", "ib0", "lo"]),
    ],
)
def test_nccl_takes_prefixes_and_exceptions(given: str, taken: list[str]):
    names = ["eth0", "eth01", "ib0", "lo"]
    assert [name for name in names if network.nccl_takes(name, given)] == taken


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
