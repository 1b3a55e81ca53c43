"""The pods of the tests: where packets do not pass between them, that is said at once."""

import pytest

from library.tests import pods

pytestmark = pytest.mark.program


@pytest.mark.skipif(bool(why := pods.why_not()), reason=why)
def test_a_machine_that_drops_packets_between_pods_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """As Docker's policy of iptables does, two ports that are isolated drop every packet."""

    def connect_isolated(space: str, link: str, bridge: str, address: str) -> None:
        connect(space, link, bridge, address)
        pods.ip(f"link set {link} type bridge_slave isolated on")

    connect = pods.connect
    monkeypatch.setattr(pods, "connect", connect_isolated)
    monkeypatch.setattr(pods, "ANSWER_S", 1)
    said = pods.why_not.__wrapped__()
    assert "this machine drops" in said
    assert "iptables -I FORWARD" in said
    assert "\n" not in said
