"""How the ranks of one run train one model: the strategy and the environment for Lightning."""

from datetime import timedelta
from importlib import import_module
from typing import Any

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    Strategy,
)
from torch.distributed.fsdp import FSDPModule

from samestep.errors import ConfigError
from samestep.option_names import option, setting
from samestep.ranks import collectives, ddp, environment
from samestep.ranks.process_group import device_kind
from samestep.run_spec import RunSpec

NAMES = ("auto", "ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false",
         "fsdp")  # fmt: skip
"""Strategies that are chosen by name. Others are objects."""
SHARDED = "samestep.plugins.fsdp"
"""The plug-in of ``fsdp``, which no other run imports."""


class TorchrunEnvironment(TorchElasticEnvironment):
    """Ranks as torchrun numbers them, also on nodes with unequal numbers of devices."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any topology: torchrun has started the ranks that there are."""


class UnequalNodesDDP(DDPStrategy):
    """DDP whose sampler for an ordinary DataLoader counts all ranks, also on unequal nodes."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Number of slices, and which one is ours; Lightning multiplies nodes by devices."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}


class VirtualDDP(UnequalNodesDDP):
    """Ranks whose gradients ``virtual.GradientTree`` sums, and not a reducer of torch."""

    def configure_ddp(self) -> None:
        """Give all ranks the same weights and buffers; nothing is wrapped."""
        assert self.model is not None
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            # It has as many ranks as slices.
            super().configure_ddp()
            return
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            if tensor.numel():
                collectives.broadcast(tensor.data)

    def _register_ddp_hooks(self) -> None:
        pass


def check(strategy: Any) -> None:
    """Raise a ConfigError if a run with this strategy, a name or an object, cannot be resumed."""
    if isinstance(strategy, Strategy):
        check_kind(type(strategy))
    elif strategy not in NAMES:
        raise ConfigError(
            f"{setting('strategy', strategy)}: is not supported: the checkpoints of a run are "
            "whole, and its ranks are started by samestep; use auto, ddp, "
            "ddp_find_unused_parameters_true or fsdp"
        )


def check_kind(kind: type[Strategy]) -> None:
    """Raise a ConfigError if a strategy of this class is for one rank, or saves in its own way.

    Other strategies that write files of their own are found by ``Checkpoints``.
    """
    name = f"{option('strategy')}: {kind.__name__}"
    if issubclass(kind, DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy):
        raise ConfigError(
            f"{name} is not supported: its checkpoints cannot be verified, or read on other ranks; "
            f"use {setting('strategy', 'fsdp')}, which shards weights, gradients and optimizer "
            "state"
        )
    num_ranks = environment.world_size()
    if num_ranks > 1 and not issubclass(kind, ParallelStrategy):
        raise ConfigError(f"{name} is for one rank, and there are {num_ranks}")


def is_sharded(strategy: Any) -> bool:
    """Whether each rank has a part of the model."""
    return getattr(strategy, "is_sharded", False)


def class_of(thing: object) -> type:
    """The class of an object as its author wrote it."""
    kind = type(thing)
    if not isinstance(thing, FSDPModule):
        return kind
    # fully_shard has made a class of FSDPModule and the author's.
    return kind.__mro__[2]


def name_of(strategy: Any) -> str:
    """The name of a strategy; of an object, the full name of its class."""
    if isinstance(strategy, str):
        return strategy
    kind = class_of(strategy)
    return f"{kind.__module__}.{kind.__qualname__}"


def topology(spec: RunSpec, strategy: Any = None) -> dict[str, Any]:
    """The Trainer's arguments that say where it runs.

    Under torchrun its environment counts; the configuration only says what to start without it.
    The strategy ``auto`` is DDP wherever torchrun started the ranks.

    Args:
        spec: of the run.
        strategy: an object that the user has made; otherwise that of ``spec``.
    """
    if spec.sync_batchnorm:
        check_sync_batchnorm(spec)
    if spec.virtual_ranks is not None:
        check_virtual_ranks(spec, strategy)
    adapt(strategy, spec)
    if not environment.under_torchrun():
        # One process. Lightning would take the variables of a Slurm allocation for ranks.
        where: dict[str, Any] = {"plugins": [LightningEnvironment()]}
        # With a single rank there is nothing to shard. A checkpoint of several ranks is read whole.
        if spec.is_fsdp:
            where["strategy"] = "auto"
        return where
    where = {"devices": environment.local_world_size(), "num_nodes": environment.num_nodes()}
    if isinstance(strategy, Strategy):
        return where
    options: dict[str, Any] = {
        "cluster_environment": TorchrunEnvironment(),
        "timeout": timedelta(seconds=spec.timeout_s),
    }
    if spec.is_fsdp:
        return {**where, "strategy": import_module(SHARDED).ShardedStrategy(**options)}
    kind = UnequalNodesDDP if spec.virtual_ranks is None else VirtualDDP
    return {**where, "strategy": kind(**options, **ddp_options(spec))}


def check_virtual_ranks(spec: RunSpec, strategy: Any) -> None:
    """Raise a ConfigError for a strategy that sums the gradients in its own way."""
    name = setting("virtual_ranks", spec.virtual_ranks)
    if spec.is_fsdp or isinstance(strategy, Strategy):
        raise ConfigError(
            f"{name}: sums the gradients of all slices in one order, and {option('strategy')} "
            f"{spec.strategy} sums them itself; use ddp"
        )


def check_sync_batchnorm(spec: RunSpec) -> None:
    """Raise a ConfigError where torch cannot average batch statistics over ranks."""
    name = setting("sync_batchnorm", True)
    if device_kind(spec.accelerator) == "cpu" and environment.world_size() > 1:
        raise ConfigError(f"{name}: needs GPUs, and these ranks are on CPUs; leave it out")
    if (spec.virtual_ranks or 0) > environment.world_size():
        raise ConfigError(
            f"{name}: needs all slices of a batch at once, and a rank computes one after the "
            f"other; use {spec.virtual_ranks} ranks"
        )
    if spec.is_fsdp:
        raise ConfigError(f"{name}: is not supported with {setting('strategy', 'fsdp')}; use ddp")


def adapt(strategy: Any, spec: RunSpec) -> None:
    """Give a DDPStrategy that the user has made the options with which a run makes its own.

    What the user has set stays. Other strategies, and names of strategies, have none of them.
    """
    if not isinstance(strategy, DDPStrategy):
        return
    if environment.under_torchrun() and strategy.cluster_environment is None:
        strategy.cluster_environment = TorchrunEnvironment()
    ddp.add_options(strategy, ddp_options(spec))
    # The object exists already, and only its sampler would count wrong. Subclasses of the user
    # keep theirs.
    if type(strategy) is DDPStrategy:
        strategy.__class__ = UnequalNodesDDP


def ddp_options(spec: RunSpec) -> dict[str, Any]:
    """What DistributedDataParallel is made with."""
    return {
        # RankState gives every rank the same buffers, once per epoch.
        **ddp.without_sync_in_forward(),
        "gradient_as_bucket_view": True,
        # Without this DDP sorts its gradients again after its first step, also after a restart. The
        # order in which three ranks or more are summed changes then, and so do the last bits.
        "find_unused_parameters": "find_unused" in spec.strategy or spec.deterministic,
    }
