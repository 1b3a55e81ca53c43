import multiprocessing
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from samestep.ranks import process_group as distributed


def meet(rank: int, port: int) -> None:
    """Join as a rank of three whose store another process keeps."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    distributed.rendezvous = lambda *_, **__: iter([(store, rank, 3)])
    fresh = distributed.store_of_this_attempt(timedelta(seconds=60))
    fresh.set(f"rank-{rank}", "here")
    fresh.wait(["rank-0", "rank-1", "rank-2"], timedelta(seconds=30))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("late", [0, 2])
def test_ranks_of_now_meet_in_a_store_full_of_the_dead(late: int):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("newest", "dead")  # an attempt before, whose rank zero welcomed nobody of now
    store.set("dead/guest/1", "ghost")
    store.add("dead/num_guests", 1)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=meet, args=(r, store.port)) for r in range(3)]
    for rank in ranks:
        if rank is not ranks[late]:
            rank.start()
    time.sleep(1.5)
    ranks[late].start()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    assert not PrefixStore("dead", store).check(["rank-0"])


def test_canary_torchrun_still_gives_each_restart_the_store_of_the_one_before():
    import inspect

    source = inspect.getsource(dist.rendezvous.__globals__["_create_c10d_store"])
    assert "no need to add prefix" in source
