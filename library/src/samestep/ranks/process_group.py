"""How the ranks of one run meet, and how they decide together."""

import atexit
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
from torch import distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _world
from torch.distributed.rendezvous import rendezvous

from samestep.errors import ConfigError, RunError
from samestep.option_names import option
from samestep.ranks import (
    collectives,
    devices,
    environment,
    failure,
    network,
    stopping,
)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

log = logging.getLogger(__name__)


_store: Store | None = None  # of this process's group, if ``init`` has made it


def leave() -> None:
    """Destroy the group that ``init`` has made, but not one that the caller created."""
    global _store
    if _store is not None and dist.is_initialized():
        destroy_groups()
    _store = None


def init(accelerator: str, timeout_s: float) -> None:
    """Meet the other ranks that torchrun started; gloo on CPUs, NCCL on GPUs.

    Lightning uses the group that exists. Without torchrun there is one rank, and no group.

    Raises:
        NetworkError: after ``timeout_s`` seconds; it says which ranks are missing.
    """
    global _store
    if not environment.under_torchrun() or dist.is_initialized():
        return
    backend = "gloo"
    if device_kind(accelerator) == "cuda":
        torch.cuda.set_device(environment.local_rank())
        # Both: decisions and errors are numbers on the CPU, for which no step on the GPU waits.
        backend = "cpu:gloo,cuda:nccl"
    # Ten seconds more than the watchdog has: it says where each rank hangs, the group does not.
    timeout = timedelta(seconds=timeout_s + 10)
    rank, world_size = environment.rank(), environment.world_size()
    try:
        _store = store_of_this_attempt(timeout)
        dist.init_process_group(
            backend, store=_store, rank=rank, world_size=world_size, timeout=timeout
        )
    except network.NetworkError:
        raise
    except RuntimeError as error:  # of torch's store, gloo or NCCL
        reason = str(error).partition("\n")[0]
        raise network.NetworkError(
            f"rank {rank} cannot connect to the other ranks ({reason}); see the logs of their nodes"
        ) from error
    # Not at the end of fit: a script may train and test several times. NCCL warns of a group that
    # is left when the process ends.
    atexit.register(leave)
    stopping.defer()


@contextmanager
def shared_errors() -> Iterator[None]:
    """Let an error within this block end all ranks with one message: the first error counts."""
    try:
        yield
    except Exception as error:
        if _store is None:
            raise
        # Before the connections close: the other ranks fail then, because of this error.
        first = publish_error(_store, error)
        failure.record(first)
        if first is error:
            raise
        raise first from None


def device_kind(accelerator: str) -> str:
    """Where the ranks have their tensors: cuda, mps or cpu."""
    if accelerator == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if devices.has_mps() else "cpu"


def store_of_this_attempt(timeout: timedelta) -> Store:
    """Return a part of torchrun's store that only this attempt uses.

    The store outlives restarts and still holds the addresses of ranks that have ended. torchrun's
    count of restarts cannot name the attempt, because it differs between nodes that came at
    different times. So rank 0 publishes a random prefix; the other ranks join the newest prefix,
    and wait until rank 0 acknowledges them there.
    """
    store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout)))
    if rank == 0:
        prefix = accept_ranks(store, world_size, timeout)
    else:
        prefix = join_rank_zero(store, rank, timeout)
    return PrefixStore(prefix, store)


def accept_ranks(store: Store, world_size: int, timeout: timedelta) -> str:
    """Publish a prefix, and accept the other ranks as they join it; only rank zero calls this."""
    deadline = time.monotonic() + timeout.total_seconds()
    prefix = secrets.token_hex(8)
    store.set("newest", prefix)
    # In the order in which they join, because one that is late must not keep the others waiting.
    for number in range(1, world_size):
        if not wait_for_key(store, f"{prefix}/member/{number}", deadline):
            others = range(1, world_size)
            missing = [rank for rank in others if not store.check([f"{prefix}/rank/{rank}"])]
            raise rendezvous_timeout(missing, timeout)
        member = store.get(f"{prefix}/member/{number}").decode()
        store.set(f"{prefix}/accepted/{member}", "")
    return prefix


def join_rank_zero(store: Store, rank: int, timeout: timedelta) -> str:
    """Join the newest prefix until rank zero accepts this rank there; return that prefix."""
    deadline = time.monotonic() + timeout.total_seconds()
    # A process, not a rank: rank zero must not accept the process of an earlier attempt.
    token = secrets.token_hex(8)
    joined = ""
    while wait_for_key(store, "newest", deadline):
        newest = store.get("newest").decode()
        if newest != joined:
            joined = newest
            store.set(f"{joined}/rank/{rank}", "")
            number = store.add(f"{joined}/num_members", 1)
            store.set(f"{joined}/member/{number}", token)
        # If it does not appear, the prefix is perhaps of an attempt that has ended: look for a
        # newer one.
        next_look = min(deadline, time.monotonic() + 1)
        if wait_for_key(store, f"{joined}/accepted/{token}", next_look):
            return joined
    raise rendezvous_timeout([0], timeout)


def wait_for_key(store: Store, key: str, deadline: float) -> bool:
    """Wait until the store has a key; return whether it came before ``deadline``."""
    # torch's own wait prints warnings and C++ frames when it takes too long.
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def rendezvous_timeout(missing: Sequence[int], timeout: timedelta) -> network.NetworkError:
    """Build the error of a rank for which others have not come in time."""
    names = ", ".join(map(str, missing))
    return network.NetworkError(
        f"rank {environment.rank()} waited {timeout.total_seconds():g} s for rank {names}: see the "
        f"logs of the nodes of these ranks; {option('timeout_s')}=SECONDS waits longer"
    )


def publish_error(store: Store, error: Exception) -> Exception:
    """Publish this rank's error to the other ranks, and return the one to end with.

    The first error of all ranks counts. If the connections of this rank broke because another rank
    has failed, it is ``OtherRankFailed``; ``LostOtherRank`` if that rank could leave no error. An
    error that several ranks raise is printed by the first of them.
    """
    rank = environment.rank()
    may_have_lost_others = failure.may_be_of_connection(error)
    if failure.is_lost_connection(error):
        log.info("A connection to another rank broke", exc_info=error)  # logs/rank-<n>.log only
        error = failure.LostOtherRank()
    mine = json.dumps([rank, failure.exit_code(error), failure.message(error)])
    try:
        # Sets the key only if it is empty, in one request: two ranks cannot both be the first.
        first_rank, exit_code, message = json.loads(store.compare_set("error", "", mine))
    except dist.DistError:
        if not may_have_lost_others:
            return error
        # The store is in the agent of rank zero's node.
        return network.NetworkError(
            f"rank {rank} has lost the node of rank 0, which has ended: see its log"
        )
    if isinstance(error, ConfigError | RunError):
        is_same = message == failure.message(error)
        error.first_rank = first_rank if is_same else rank
        return error
    if first_rank == rank or not may_have_lost_others:
        return error
    if not message.startswith(failure.PREFIX):
        message = f"rank {first_rank} has failed: {message}"
    return failure.OtherRankFailed(message, exit_code, first_rank)


def broadcast(value: Result, source: int = 0) -> Result:
    """Return the value of the rank ``source``, on every rank."""
    values = [value]
    if collectives.num_ranks() > 1:
        dist.broadcast_object_list(values, src=source, group=collectives.cpu_group())
    return values[0]


def gather(value: Result) -> list[Result]:
    """Return the values of all ranks, by rank, on every rank."""
    values = [value] * collectives.num_ranks()
    if collectives.num_ranks() > 1:
        dist.all_gather_object(values, value, group=collectives.cpu_group())
    return values


def on_rank_zero(
    function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Call ``function`` on rank zero alone, and give what it returns to every rank.

    Raises:
        ConfigError, RunError: on every rank, what ``function`` raised on rank zero.
    """

    def on_one_rank() -> Any:
        if environment.rank() == 0:
            return function(*args, **kwargs)
        return None

    # The other ranks wait for an answer, even if it is an error. Without one they would end with
    # errors of the network.
    result: Result = broadcast(on_all_ranks(on_one_rank))
    return result


def on_all_ranks(
    function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Call ``function`` on every rank; if it fails on one of them, every rank raises its error.

    Raises:
        ConfigError, RunError: on every rank, what ``function`` raised on the first that failed.
    """
    error: ConfigError | RunError | None = None
    try:
        result = function(*args, **kwargs)
    except (ConfigError, RunError) as raised:
        error = raised
    for first in gather(error):
        if first is not None:
            raise first
    return result


def destroy_groups() -> None:
    """Destroy all process groups; the GIL is free while their threads end.

    A thread of gloo needs the GIL to give up the last tensor that it has sent. Before torch 2.8 a
    group keeps the GIL while it waits for these threads, so that the process may hang. A backend
    releases it. Upstream: pytorch/pytorch pull request 154976.
    """
    backends = backends_of_groups()
    dist.destroy_process_group()
    # Last, or a group would destroy its backends itself.
    backends.clear()


def backends_of_groups() -> list[Any]:
    """The gloo and NCCL of every process group; nothing here may keep a group itself."""
    backends: list[Any] = []
    for group in _world.pg_map:
        for device in group._device_types:
            backends.append(group._get_backend(device))
    return backends
