"""Two nodes as threads, and a real etcd. Whole runs: labs/faults."""

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from library.tests import etcd_server
from library.tests.etcd_server import EtcdServer
from library.tests.programs import PATIENCE_S, until

pytest.importorskip("etcd", reason="pip install python-etcd")
from samestep.node.etcd_rendezvous import EtcdRendezvous, is_loss

pytestmark = pytest.mark.program


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EtcdServer]:
    if why := etcd_server.why_not():
        pytest.skip(why)
    # As the entry point does.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    server = EtcdServer(tmp_path)
    server.start(tmp_path / "data")
    yield server
    gc.collect()  # the heartbeats of its nodes end, which would warn in the tests to come
    server.kill()


def parameters(server: EtcdServer, **settings: str) -> RendezvousParameters:
    # A node counts as gone after 12 s. On a busy disk etcd takes a second for a heartbeat, and a
    # node whose writes take as long as the pause between those of another never gets its turn.
    common = {
        "join_timeout": "300", "last_call_timeout": "300", "read_timeout": "60",
        "keep_alive_interval": "3", "keep_alive_max_attempt": "4",
    }  # fmt: skip
    return RendezvousParameters(
        "etcd-v2", server.address, "mine", 1, 2, "127.0.0.1", **(common | settings)
    )


def two_nodes(server: EtcdServer) -> list[EtcdRendezvous]:
    nodes = [EtcdRendezvous(parameters(server)), EtcdRendezvous(parameters(server))]
    meet(nodes)
    return nodes


def meet(
    nodes: list[EtcdRendezvous], met: dict[EtcdRendezvous, RendezvousInfo] | None = None
) -> None:
    """The two nodes become one group. Those that have ``met`` others see that a node waits."""
    met = met or {}

    def are_one_group() -> bool:
        return all(node in met and met[node].world_size == len(nodes) for node in nodes)

    def take_part(node: EtcdRendezvous) -> None:
        if node not in met:
            met[node] = node.next_rendezvous()
        deadline = time.monotonic() + PATIENCE_S
        while not are_one_group():
            assert time.monotonic() < deadline
            # As an agent does: etcd may fail the other node halfway, or its heartbeat may be late,
            # and it then begins anew.
            if node.num_nodes_waiting():
                met[node] = node.next_rendezvous()
            time.sleep(0.1)

    with ThreadPoolExecutor() as threads:
        list(threads.map(take_part, nodes))
    one, other = met.values()
    assert sorted([(one.rank, one.world_size), (other.rank, other.world_size)]) == [(0, 2), (1, 2)]
    assert one.bootstrap_store_info == other.bootstrap_store_info
    assert [node.num_nodes_waiting() for node in nodes] == [0, 0]


def test_a_node_that_etcd_fails_halfway_meets_the_other_one_again(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
):
    nodes = [EtcdRendezvous(parameters(server)) for _ in range(2)]
    meet_once, errors = nodes[1]._meet, [RendezvousConnectionError("halfway")]

    def fail_once() -> RendezvousInfo:
        info = meet_once()
        if errors:
            raise errors.pop()
        return info

    monkeypatch.setattr(nodes[1], "_meet", fail_once)
    meet(nodes)
    assert errors == []


def test_a_node_that_is_gone_is_not_waited_for_and_another_may_join(server: EtcdServer):
    nodes = [EtcdRendezvous(parameters(server, last_call_timeout="1")) for _ in range(2)]
    meet(nodes)
    nodes.pop()  # its heartbeats end
    alone = nodes[0].next_rendezvous()
    assert (alone.rank, alone.world_size) == (0, 1)
    another = EtcdRendezvous(parameters(server))
    meet([nodes[0], another], {nodes[0]: alone})


def test_a_node_whose_place_was_given_away_meets_the_others_again(server: EtcdServer):
    """Its heartbeats come too late, as on a machine without a free core."""
    late, other = (
        EtcdRendezvous(parameters(server, last_call_timeout="1", keep_alive_max_attempt=attempts))
        for attempts in ("10", "3")
    )
    late.next_rendezvous()
    late._backend.has_left = True
    alone = other.next_rendezvous()
    assert (alone.rank, alone.world_size) == (0, 1)
    late._backend.has_left = False
    assert [late.num_nodes_waiting() for _ in range(2)] == [0, 1]
    meet([late, other])


def test_nodes_go_on_without_etcd_and_meet_again_when_it_is_back(
    server: EtcdServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    nodes = two_nodes(server)
    before = [node._handler for node in nodes]  # as a failed heartbeat may keep them
    server.kill()
    for _ in range(3):
        assert [node.num_nodes_waiting() for node in nodes] == [0, 0]
    server.start(tmp_path / "data")  # with what it knew
    until(lambda: all(node.num_nodes_waiting() for node in nodes))
    meet(nodes)
    assert not [record for record in caplog.records if record.name.startswith(("etcd", "urllib3"))]
    stdout = capsys.readouterr().out
    assert stdout.count("entrypoint: etcd is lost (") == 2
    assert stdout.count("entrypoint: etcd is back; the nodes have met again\n") == 2
    assert all(before)
    # One that was replaced by an empty one between two looks is noticed.
    server.kill()
    server.start(tmp_path / "empty")
    assert [node.num_nodes_waiting() for node in nodes] == [0, 0]
    until(lambda: all(node.num_nodes_waiting() for node in nodes))
    meet(nodes)
    # Nodes that must meet wait for it.
    server.kill()
    with ThreadPoolExecutor() as threads:
        meeting = threads.submit(meet, nodes)
        until(lambda: all(node._is_lost for node in nodes))
        assert not meeting.done()
        server.start(tmp_path / "empty again")
        meeting.result(PATIENCE_S)


def test_the_wait_for_etcd_ends_with_a_reason(server: EtcdServer):
    server.kill()
    node = EtcdRendezvous(parameters(server, join_timeout="1"))
    with pytest.raises(RendezvousTimeoutError, match=r"no etcd for 1 s: .*list of servers"):
        node.next_rendezvous()
    assert not is_loss(RendezvousTimeoutError("no etcd"))  # so the agent does not wait once more


def test_a_node_that_ends_leaves_the_rendezvous_open_for_those_that_replace_it(server: EtcdServer):
    nodes = two_nodes(server)
    assert all(node.shutdown() for node in nodes)
    nodes.clear()  # their heartbeats end
    two_nodes(server)


def test_canary_torch_still_closes_the_rendezvous_for_ever(server: EtcdServer):
    assert get_rendezvous_handler(parameters(server)).shutdown()
    assert get_rendezvous_handler(parameters(server)).is_closed()


def test_which_errors_mean_that_etcd_is_lost():
    for error in (RendezvousConnectionError(), LookupError("Key role_info/1 not found in Etcd")):
        assert is_loss(error)
    for error in (KeyError("a mistake"), RuntimeError()):
        assert not is_loss(error)
