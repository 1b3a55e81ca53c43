"""How the ranks of one run meet, and how they decide together."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, Strategy
from omegaconf import DictConfig
from torch import distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from samestep.errors import ConfigError, RunError
from samestep.ranks import environment, failure, stopping

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class TorchrunEnvironment(TorchElasticEnvironment):
    """Ranks as torchrun numbers them, also on nodes with unequal numbers of devices."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any topology: torchrun has started the ranks that there are."""


class UnequalNodesDDP(DDPStrategy):
    """DDP whose sampler for an ordinary DataLoader counts all ranks, also on unequal nodes."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Number of shares, and which one is ours; Lightning multiplies nodes by devices."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}


@contextmanager
def process_group(cfg: DictConfig) -> Iterator[None]:
    """Meet the other ranks that torchrun started; gloo on CPUs, NCCL on GPUs.

    Lightning uses the group that exists. Without torchrun there is one rank, and no group.
    """
    if not environment.under_torchrun():
        yield
        return
    backend = "gloo"
    if device_kind(cfg) == "cuda":
        torch.cuda.set_device(environment.local_rank())
        backend = "cpu:gloo,cuda:nccl"
    # Ten seconds more than the watchdog has: it says where each rank hangs, the group does not.
    timeout = timedelta(seconds=cfg.cluster.timeout_s + 10)
    dist.init_process_group(
        backend,
        store=store_of_this_attempt(timeout),
        rank=environment.rank(),
        world_size=environment.world_size(),
        timeout=timeout,
    )
    stopping.defer()
    try:
        yield
    except Exception as error:
        # Recorded before the connections close. The other ranks fail then, and only follow.
        failure.record(error)
        raise
    finally:
        dist.destroy_process_group()


def device_kind(cfg: DictConfig) -> str:
    """Where the ranks have their tensors: cuda or cpu."""
    return "cuda" if cfg.trainer.accelerator != "cpu" and torch.cuda.is_available() else "cpu"


def store_of_this_attempt(timeout: timedelta) -> Store:
    """A fresh prefix in torchrun's store for this attempt.

    The store outlives restarts and still holds the addresses of ranks that have ended. torchrun's
    count of restarts cannot name the attempt, because it differs between nodes that came at
    different times. So rank 0 publishes a random prefix; the other ranks join the newest prefix,
    and wait until rank 0 acknowledges them there.
    """
    store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout)))
    token = secrets.token_hex(8)
    if rank == 0:
        store.set("newest", token)
        for number in range(1, world_size):
            member = store.get(f"{token}/member/{number}").decode()
            store.set(f"{token}/accepted/{member}", "")
        return PrefixStore(token, store)

    joined = ""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        newest = store.get("newest").decode()
        if newest != joined:
            joined = newest
            store.set(f"{joined}/member/{store.add(f'{joined}/num_members', 1)}", token)
        try:
            store.wait([f"{joined}/accepted/{token}"], timedelta(seconds=1))
            return PrefixStore(joined, store)
        except dist.DistStoreError:  # not yet; or this prefix is of an attempt that has ended
            if time.monotonic() > deadline:
                raise


def broadcast(value: Result) -> Result:
    """The value that rank zero has, on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def on_rank_zero(
    function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Call ``function`` on rank zero alone, and give what it returns to every rank.

    Raises:
        ConfigError, RunError: on every rank, what ``function`` raised on rank zero.
    """
    result: Any = None
    if environment.rank() == 0:
        try:
            result = function(*args, **kwargs)
        except (ConfigError, RunError) as error:
            # The others wait for an answer. Without one they would end with errors of the network.
            result = error
    result = broadcast(result)
    if isinstance(result, (ConfigError, RunError)):
        result.on_all_ranks = True
        raise result
    value: Result = result
    return value


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
    errors: list[Any] = [error] * environment.world_size()
    if dist.is_initialized():
        dist.all_gather_object(errors, error)
    for first in filter(None, errors):
        first.on_all_ranks = True
        raise first
    return result


def topology(cfg: DictConfig) -> dict[str, Any]:
    """The Trainer's arguments that say where it runs.

    Under torchrun its environment counts; the configuration only says what to start without it.
    ``trainer.strategy=auto`` is DDP wherever torchrun started the ranks.

    Raises:
        ConfigError: if ``trainer.strategy=fsdp`` finds no GPU.
    """
    if cfg.trainer.strategy == "fsdp" and not torch.cuda.is_available():
        raise ConfigError(
            "trainer.strategy=fsdp: needs GPUs, and this machine has none; trainer.strategy=ddp "
            "trains on CPUs"
        )
    if not environment.under_torchrun():
        # One process. Lightning would take the variables of a Slurm allocation for ranks.
        return {"plugins": [LightningEnvironment()]}
    return {
        "devices": environment.local_world_size(),
        "num_nodes": environment.num_nodes(),
        "strategy": build_strategy(cfg),
    }


def build_strategy(cfg: DictConfig) -> Strategy:
    """FSDP if ``cfg.trainer.strategy`` says so, otherwise DDP."""
    common: dict[str, Any] = {
        "cluster_environment": TorchrunEnvironment(),
        "timeout": timedelta(seconds=cfg.cluster.timeout_s),
    }
    if cfg.trainer.strategy == "fsdp":
        # "full": a checkpoint of whole weights, which any number of ranks can read.
        return FSDPStrategy(state_dict_type="full", **common)
    return UnequalNodesDDP(
        # AverageBuffers gives every rank the same buffers, once per epoch.
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
        # Without this DDP sorts its gradients anew after its first step, also after a restart.
        # The order in which three ranks or more are summed changes then, and so do the last bits.
        find_unused_parameters="find_unused" in cfg.trainer.strategy
        or cfg.trainer.deterministic is True,
        **common,
    )
