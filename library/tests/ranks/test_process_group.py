import multiprocessing
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from library.tests.kit import Clock
from library.tests.programs import PATIENCE_S, until
from samestep.errors import ConfigError, RunError
from samestep.ranks import environment, failure
from samestep.ranks import process_group as distributed
from samestep.ranks.network import NetworkError


def meet(rank: int, port: int) -> None:
    """Join as a rank of three whose store another process keeps."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
    distributed.rendezvous = lambda *_, **__: iter([(store, rank, 3)])
    fresh = distributed.store_of_this_attempt(timedelta(seconds=PATIENCE_S))
    fresh.set(f"rank-{rank}", "here")
    fresh.wait(["rank-0", "rank-1", "rank-2"], timedelta(seconds=PATIENCE_S))


@pytest.mark.program
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_ranks_meet_in_a_store_that_holds_addresses_of_an_older_attempt():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("newest", "older")  # an older attempt, whose rank zero accepted none of these ranks
    store.set("older/member/1", "ended")
    store.add("older/num_members", 1)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=meet, args=(r, store.port)) for r in range(3)]
    for rank in ranks:
        if rank is not ranks[0]:
            rank.start()
    # They join the older attempt: "rank-1" and "rank-2" there are those of nobody.
    until(lambda: store.check(["older/rank/1", "older/rank/2"]))
    ranks[0].start()
    for rank in ranks:
        rank.join(PATIENCE_S)
        assert rank.exitcode == 0
    assert not PrefixStore("older", store).check(["rank-0"])


@pytest.mark.parametrize(
    ("rank", "missing"), [(0, "waited 300 s for rank 1, 2:"), (2, "waited 300 s for rank 0:")]
)
def test_ranks_that_do_not_come_are_named(monkeypatch, rank: int, missing: str):
    store = dist.HashStore()
    monkeypatch.setattr(distributed, "rendezvous", lambda *_, **__: iter([(store, rank, 3)]))
    monkeypatch.setattr(environment, "rank", lambda: rank)
    clock = Clock()
    monkeypatch.setattr(distributed, "time", clock)
    began = clock.now
    with pytest.raises(NetworkError, match=missing):
        distributed.store_of_this_attempt(timedelta(seconds=300))
    assert 300 < clock.now - began < 300.3


@pytest.mark.parametrize(
    ("error", "message"),
    [(ConfigError("no"), "error: no"), (ValueError("no"), "rank 0 has failed: ValueError: no")],
)
def test_a_rank_that_loses_its_connections_learns_the_error_of_the_first(
    monkeypatch, capsys, error: Exception, message: str
):
    store = dist.HashStore()
    assert distributed.publish_error(store, error) is error
    monkeypatch.setattr(environment, "rank", lambda: 1)
    lost = distributed.publish_error(store, RuntimeError("Connection closed by peer"))
    assert failure.report(lost) == failure.exit_code(error)
    assert failure.message(lost) == message
    assert capsys.readouterr() == ("", "")
    own = RunError("second")
    assert distributed.publish_error(store, own) is own


GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:6"


def test_a_rank_that_was_killed_leaves_one_line_of_one_rank(monkeypatch, capsys):
    store = dist.HashStore()
    codes = []
    for rank in (1, 2):
        monkeypatch.setattr(environment, "rank", lambda rank=rank: rank)
        codes.append(failure.report(distributed.publish_error(store, RuntimeError(GLOO))))
    assert codes == [1, 1]
    assert capsys.readouterr().err == (
        "error: rank 1 has lost its connection to another rank, which has ended without leaving "
        "an error\n"
    )


def test_a_rank_whose_store_has_ended_says_so_in_one_line():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    del server
    lost = distributed.publish_error(store, RuntimeError("Connection closed by peer"))
    assert failure.message(lost) == (
        "error: rank 0 has lost the node of rank 0, which has ended: see its log"
    )
    own = ValueError("own")
    assert distributed.publish_error(store, own) is own


def test_canary_torchrun_still_gives_each_restart_the_store_of_the_one_before():
    import inspect

    source = inspect.getsource(dist.rendezvous.__globals__["_create_c10d_store"])
    assert "no need to add prefix" in source
