"""What a run needs of torch and Lightning, and which versions have it."""

from functools import cache
from pkgutil import resolve_name

from samestep.errors import ConfigError

PACKAGES = "torch", "lightning", "torchmetrics"
NEEDED = (
    "lightning.fabric.utilities.data:_set_sampler_epoch",
    "lightning.fabric.utilities.distributed:DistributedSamplerWrapper",
    "lightning.pytorch.loops.fetchers:_DataLoaderIterDataFetcher",
    "lightning.pytorch.loops.fetchers:_PrefetchDataFetcher",
    "lightning.pytorch.loops.fit_loop:_FitLoop._load_combined_loader_states",
    "lightning.pytorch.loops.fit_loop:_FitLoop.on_advance_end",
    "lightning.pytorch.loops.fit_loop:_FitLoop.setup_data",
    "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop.on_advance_end",
    "lightning.pytorch.trainer.call:_call_callback_hooks",
    "lightning.pytorch.trainer.call:_call_lightning_datamodule_hook",
    "lightning.pytorch.trainer.call:_call_lightning_module_hook",
    "lightning.pytorch.trainer.connectors.data_connector:_DataConnector._prepare_dataloader",
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector:"
    "_LoggerConnector.epoch_end_reached",
    "lightning.pytorch.trainer.connectors.logger_connector.result:_ResultCollection.valid_items",
    "lightning.pytorch.trainer.connectors.logger_connector.result:_ResultCollection._forked_name",
    "lightning.pytorch.trainer.connectors.signal_connector:"
    "_SignalConnector.register_signal_handlers",
    "lightning.pytorch.utilities.compile:_maybe_unwrap_optimized",
    "lightning.pytorch.utilities.data:_get_dataloader_init_args_and_kwargs",
    "torch:_foreach_norm",
    "torch:_amp_foreach_non_finite_check_and_unscale_",
    "torch.distributed:ProcessGroup._device_types",
    "torch.distributed:ProcessGroup._get_backend",
    "torch.distributed.distributed_c10d:GroupMember",
    "torch.distributed.distributed_c10d:_World.pg_map",
    "torch.distributed.fsdp:FSDPModule",
    "torch.nn.parallel:DistributedDataParallel._check_reducer_finalized",
    "torch.nn.parallel:DistributedDataParallel._remove_autograd_hooks",
    "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
)
"""Names without which a run would not be the same after an interruption, or on several ranks.

Most are private. A version that lacks what is only faster is slower, and says so in the log.
"""


@cache  # once in a process: the versions do not change
def check() -> None:
    """Raise a ConfigError, before the first step, if a name is missing."""
    for name in NEEDED:
        try:
            resolve_name(name)
        except (ImportError, AttributeError):
            raise ConfigError(explain(name.partition(".")[0].partition(":")[0], name)) from None


def explain_import(error: ImportError) -> str | None:
    """Why a module of ours cannot be imported; None if it is not a version of these packages."""
    package = str(error.name).partition(".")[0]
    is_there = package in PACKAGES and not isinstance(error, ModuleNotFoundError)
    return explain(package, str(error)) if is_there else None


def explain(package: str, what: str) -> str:
    """The message for a version that lacks something."""
    from importlib.metadata import version  # 20 ms, and only an error needs it

    return (
        f"{package}: version {version(package)} lacks what a run needs ({what}). Install "
        f"{supported()}, or a samestep for your version"
    )


def supported() -> str:
    """The versions that the installed Samestep is tried with, as its metadata have them."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires("samestep") or []
    except PackageNotFoundError:  # such as a copy of the folder
        lines = []
    found = [line for line in lines if line.startswith(PACKAGES) and ";" not in line]
    return ", ".join(sorted(found)) or "the versions of its README"
