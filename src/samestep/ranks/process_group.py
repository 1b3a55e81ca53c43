"""How the ranks of one run find and follow each other."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, Strategy
from omegaconf import DictConfig
from torch import distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from samestep.errors import ConfigError
from samestep.ranks import environment, stopping

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class TorchrunEnvironment(TorchElasticEnvironment):
    """Ranks as torchrun numbers them, also on nodes with unequal numbers of devices."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any topology: torchrun's is the one that exists."""


@contextmanager
def process_group(cfg: DictConfig) -> Iterator[None]:
    """Meet the other ranks that torchrun started; gloo on CPUs, NCCL on GPUs.

    Lightning uses the group it finds. Without torchrun there is nobody to meet.
    """
    if not environment.under_torchrun():
        yield
        return
    backend = "gloo"
    if device_kind(cfg) == "cuda":
        torch.cuda.set_device(environment.local_rank())
        backend = "cpu:gloo,cuda:nccl"
    # The watchdog of stopping.py, which says where each rank hangs, goes first.
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
    finally:
        dist.destroy_process_group()


def device_kind(cfg: DictConfig) -> str:
    """Where the ranks have their tensors: cuda or cpu."""
    return "cuda" if cfg.trainer.accelerator != "cpu" and torch.cuda.is_available() else "cpu"


def store_of_this_attempt(timeout: timedelta) -> Store:
    """A part of torchrun's store in which nobody has written before.

    torchrun keeps one store over all restarts, with the addresses of the dead in it; and its count
    of restarts differs between nodes that came at different times. So rank zero makes up a name,
    and each other rank follows the newest one until rank zero, which lives, welcomes it there.
    """
    store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout)))
    token, joined = secrets.token_hex(8), ""
    if rank == 0:
        store.set("newest", token)
        for number in range(1, world_size):
            guest = store.get(f"{token}/guest/{number}").decode()
            store.set(f"{token}/welcome/{guest}", "")
        return PrefixStore(token, store)
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        newest = store.get("newest").decode()
        if newest != joined:
            joined = newest
            store.set(f"{joined}/guest/{store.add(f'{joined}/num_guests', 1)}", token)
        try:
            store.wait([f"{joined}/welcome/{token}"], timedelta(seconds=1))
            return PrefixStore(joined, store)
        except dist.DistStoreError:  # not yet; or a rank zero of before
            if time.monotonic() > deadline:
                raise


def from_rank_zero(
    function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Call ``function`` on rank zero alone, and give what it returns to every rank."""
    result: list[Any] = [None]
    if environment.rank() == 0:
        result = [function(*args, **kwargs)]
    if dist.is_initialized():
        dist.broadcast_object_list(result, src=0)
    value: Result = result[0]
    return value


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
        return {}
    common: dict[str, Any] = {
        "cluster_environment": TorchrunEnvironment(),
        "timeout": timedelta(seconds=cfg.cluster.timeout_s),
    }
    strategy: Strategy
    if cfg.trainer.strategy == "fsdp":  # a checkpoint of whole weights, for any number of ranks
        strategy = FSDPStrategy(state_dict_type="full", **common)
    else:
        strategy = DDPStrategy(
            forward_sync_buffers=False,  # the model averages them once per epoch
            gradient_as_bucket_view=True,
            # Else DDP sorts its gradients anew after its first step, also after a restart, which
            # changes the order in which three ranks or more are summed, and so the last bits.
            find_unused_parameters="find_unused" in cfg.trainer.strategy
            or cfg.trainer.deterministic is True,
            **common,
        )
    return {
        "devices": environment.local_world_size(),
        "num_nodes": environment.num_nodes(),
        "strategy": strategy,
    }
