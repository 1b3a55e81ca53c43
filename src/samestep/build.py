"""From the configuration to objects: the only place where Hydra's ``_target_`` is called."""

import difflib
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning as L
import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf
from torch.overrides import TorchFunctionMode

from samestep.callbacks.best_checkpoint import BestCheckpoint
from samestep.callbacks.changed_values import ChangedValues
from samestep.callbacks.epoch_checkpoints import EpochCheckpoints
from samestep.callbacks.epoch_times import EpochTimes
from samestep.callbacks.exact import AverageBuffers, KeepSums, ResumeOrder, SeedSteps
from samestep.callbacks.last_checkpoint import LastCheckpoint
from samestep.callbacks.run_state import RunState
from samestep.callbacks.share_out import ShareOut
from samestep.callbacks.step_log import StepLog
from samestep.callbacks.stop import StopBetweenSteps
from samestep.callbacks.watchdog import Watchdog
from samestep.errors import ConfigError, RunError
from samestep.ranks import environment, lightning_patches
from samestep.ranks.process_group import device_kind, on_all_ranks, topology
from samestep.run.checkpoint import AtomicCheckpointIO
from samestep.run.history import History

# What a constructor raises when it refuses an argument.
REFUSALS = (ValueError, TypeError, LookupError, ImportError, MisconfigurationException)
OWN_TRAINER_KEYS = {"save_every_n_epochs"}  # of cfg.trainer; Lightning's Trainer has no such flags


class Parts(NamedTuple):
    """What a run is made of."""

    model: L.LightningModule
    datamodule: L.LightningDataModule
    trainer: L.Trainer
    history: History


def everything(cfg: DictConfig) -> Parts:
    """Build all that ``cfg`` describes, and set up its data. No file of the run is written.

    Every rank must call this. What fails on one rank fails on all of them.

    Raises:
        ConfigError: if the configuration cannot be run.
        RunError: if the data are missing or damaged: exit code 2, unless the error says otherwise.
    """
    parts = on_all_ranks(build_parts, cfg)
    try:
        # No rank opens the data before all nodes have them.
        on_all_ranks(prepare_data, parts)
        on_all_ranks(set_up_data, cfg, parts)
    except RunError as error:
        if error.is_final is None:
            # Data that are missing now would be missing at the next try too.
            error.is_final = True
        raise
    return parts


def build_parts(cfg: DictConfig) -> Parts:
    """The objects; nothing is read yet."""
    check_arguments(cfg)
    module = model(cfg)
    check_monitors(cfg, module)
    history = History(cfg.run_dir)
    return Parts(module, datamodule(cfg), trainer(cfg, history), history)


def prepare_data(parts: Parts) -> None:
    """Make the files of the data set present, on one rank of each node."""
    if environment.local_rank() == 0:
        parts.datamodule.prepare_data()


def set_up_data(cfg: DictConfig, parts: Parts) -> None:
    """Open the data. Lightning does so when training begins, which is too late to refuse."""
    parts.datamodule.trainer = parts.trainer
    with refusals("data"):
        parts.datamodule.setup("fit")
        check_validation_interval(cfg, parts.datamodule)


def model(cfg: DictConfig) -> L.LightningModule:
    """The LightningModule of ``cfg.model``."""
    with MemoryLimit("model"):
        module = build(cfg.model, "model")
    if not isinstance(module, L.LightningModule):
        raise ConfigError(f"model._target_={cfg.model._target_}: must be a LightningModule")
    if cfg.trainer.precision == "64-true":
        # Lightning 2.6 would load a checkpoint into 32 bits, and make them 64 bits afterwards.
        module.double()
    return module


def datamodule(cfg: DictConfig) -> L.LightningDataModule:
    """The DataModule of ``cfg.data``; nothing is read yet."""
    data = build(cfg.data, "data")
    if not isinstance(data, L.LightningDataModule):
        raise ConfigError(f"data._target_={cfg.data._target_}: must be a LightningDataModule")
    return data


def has_test(module: L.LightningModule, data: L.LightningDataModule) -> bool:
    """Whether there is something to test: a ``test_step``, and a ``test_dataloader`` of either.

    Lightning would refuse to test such a model, after it was trained.
    """
    has_data = is_overridden("test_dataloader", data) or is_overridden("test_dataloader", module)
    return bool(is_overridden("test_step", module) and has_data)


def trainer(cfg: DictConfig, history: History) -> L.Trainer:
    """The Trainer of ``cfg.trainer``, with the callbacks of every run and those of ``cfg``.

    Its loggers come later (``loggers``): they write files.
    """
    chosen = {name: build(cfg.callbacks[name], f"callbacks.{name}") for name in cfg.callbacks or {}}
    for name, callback in chosen.items():
        if not isinstance(callback, L.Callback):
            target = cfg.callbacks[name].get("_target_")
            raise ConfigError(f"callbacks.{name}._target_={target}: must be a Lightning Callback")
        if isinstance(callback, ProgressBar):
            raise ConfigError(
                f"callbacks.{name}: leave it out; callbacks.progress draws a bar, and two of them "
                "cannot share a terminal"
            )
    last = next((c for c in chosen.values() if isinstance(c, LastCheckpoint)), None)
    best = next((c for c in chosen.values() if isinstance(c, BestCheckpoint)), None)
    if last:
        last.best = best
    callbacks = [
        StopBetweenSteps(last),  # first, so that no other callback has begun a step
        history,
        Watchdog(cfg.cluster.timeout_s, cfg.run_dir),
        SeedSteps(cfg.seed),
        ResumeOrder(cfg.seed),
        AverageBuffers(),
        *share_out(cfg),
        KeepSums(),
        ChangedValues(),
        StepLog(),
        EpochTimes(),
        RunState(cfg.run_dir),
        *keep_epochs(last, cfg.trainer.save_every_n_epochs),
        *chosen.values(),
    ]
    where = topology(cfg)
    arguments = {
        "callbacks": callbacks,
        "logger": False,
        "plugins": [AtomicCheckpointIO(), *where.pop("plugins", [])],
        # Without a callback that saves, Lightning would save checkpoints of its own.
        "enable_checkpointing": any(isinstance(c, Checkpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": cfg.run_dir,
        # Lightning leaves our loader alone, and shares the data of ordinary ones out.
        "use_distributed_sampler": True,
        **where,
    }
    lightning_trainer: L.Trainer = build(flags_of_lightning(cfg), "trainer", **arguments)
    lightning_patches.leave_signals_to_us(lightning_trainer)
    lightning_patches.search_gpus_once()
    lightning_patches.call_hooks_directly()
    lightning_patches.look_at_hooks_once()
    lightning_patches.leave_out_empty_batches()
    return lightning_trainer


def share_out(cfg: DictConfig) -> list[L.Callback]:
    """The callback for slices of unequal length; none if there can be only one for each step."""
    is_needed = environment.world_size() > 1 or cfg.trainer.accumulate_grad_batches > 1
    return [ShareOut()] if is_needed else []


def lone_trainer(cfg: DictConfig, *callbacks: L.Callback) -> L.Trainer:
    """A Trainer for this rank alone, with the flags of ``cfg``, that only trains."""
    is_on_gpu = device_kind(cfg) == "cuda"
    arguments = {
        "callbacks": list(callbacks),
        "logger": False,
        "plugins": [LightningEnvironment()],
        "devices": [environment.local_rank()] if is_on_gpu else 1,
        "num_nodes": 1,
        "strategy": "auto",
        "sync_batchnorm": False,
        "min_epochs": None,
        "min_steps": None,
        "max_time": None,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "profiler": None,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    lightning_trainer: L.Trainer = build(flags_of_lightning(cfg), "trainer", **arguments)
    lightning_patches.leave_signals_to_us(lightning_trainer)
    return lightning_trainer


def flags_of_lightning(cfg: DictConfig) -> DictConfig:
    """``cfg.trainer`` without the keys that ``lightning.Trainer`` does not have."""
    flags = OmegaConf.to_container(cfg.trainer, resolve=True)
    assert isinstance(flags, dict)
    return OmegaConf.create({key: flags[key] for key in flags if key not in OWN_TRAINER_KEYS})


def keep_epochs(last: LastCheckpoint | None, every_n_epochs: int | None) -> list[L.Callback]:
    """The callback for ``trainer.save_every_n_epochs``; none where no checkpoints are saved."""
    if last is not None:
        last.epochs = EpochCheckpoints(str(last.path.parent), every_n_epochs)
        return [last.epochs]
    if every_n_epochs is None:
        return []
    raise ConfigError(
        f"trainer.save_every_n_epochs={every_n_epochs}: keeps copies of last.ckpt, and no callback "
        "saves it; add `defaults: - default` to the callbacks, or set it to null"
    )


def loggers(cfg: DictConfig) -> list[Logger]:
    """The loggers of ``cfg.logger``; on rank zero only."""
    if environment.rank() > 0 or cfg.trainer.fast_dev_run:
        return []
    return [build(cfg.logger[name], f"logger.{name}") for name in cfg.logger or {}]


def build(node: DictConfig, key: str, **arguments: Any) -> Any:
    """Call the ``_target_`` of ``node``; what its constructor refuses is the user's to change."""
    try:
        return instantiate(node, _convert_="all", **arguments)
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, ConfigError):
            raise cause from error
        # Hydra itself refuses targets that could run any program, such as os.system.
        if isinstance(cause, (*REFUSALS, InstantiationException)):
            raise ConfigError(f"{key}: {node.get('_target_')} refuses: {cause}") from error
        raise cause from error


@contextmanager
def refusals(key: str) -> Iterator[None]:
    """Turn what Lightning raises for a wrong setting into a ConfigError that names ``key``."""
    try:
        yield
    except MisconfigurationException as error:
        raise ConfigError(f"{key}: {error}") from error
    except RuntimeError as error:
        refusal = refusal_of(error)
        if refusal is None:
            raise
        raise refusal from error


def refusal_of(error: RuntimeError) -> ConfigError | None:
    """What the user can set, if this is an error of Lightning or DDP that all ranks raise."""
    text = str(error)
    # EarlyStopping raises this when the model does not log its metric.
    if text.startswith("Early stopping conditioned on metric"):
        return ConfigError(f"callbacks.early_stopping.monitor: {text}", on_all_ranks=True)
    if "parameters that were not used in producing" in text:
        return ConfigError(
            "trainer.strategy: a step leaves some parameters of the model without a gradient, and "
            "DDP waits for them; use trainer.strategy=ddp_find_unused_parameters_true",
            on_all_ranks=True,
        )
    return None


class MemoryLimit(TorchFunctionMode):
    """Refuses a model that cannot fit into memory before its first huge tensor is made.

    Without it a mistyped width fills the memory for minutes, and then the kernel ends the process.
    """

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key
        self.wanted = 0
        self.limit = environment.memory_bytes()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count what ``torch.empty`` is asked for: layers make their weights with it."""
        kwargs = kwargs or {}
        if function is torch.empty:
            shape = kwargs.get("size", args[0] if args and not isinstance(args[0], int) else args)
            self.wanted += 4 * math.prod(shape)
        if self.wanted > self.limit:
            raise ConfigError(
                f"{self.key}: its weights would take {self.wanted / 2**30:,.0f} GiB, and this "
                f"machine has {self.limit / 2**30:,.0f} GiB of memory; choose smaller layers"
            )
        return function(*args, **kwargs)


def check_monitors(cfg: DictConfig, module: L.LightningModule) -> None:
    """Compare each ``monitor`` with ``module.metric_names``, where the model says those.

    Raises:
        ConfigError: naming the metric and its nearest neighbour.
    """
    known = getattr(module, "metric_names", None)
    if known is None:
        return
    for name, node in (cfg.callbacks or {}).items():
        monitor = node.get("monitor")
        if monitor is not None and monitor not in known:
            near = difflib.get_close_matches(monitor, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"callbacks.{name}.monitor={monitor}: the model logs no such metric; {hint}"
                f"It logs {', '.join(known)}"
            )


def check_validation_interval(cfg: DictConfig, data: L.LightningDataModule) -> None:
    """Raise a ConfigError if validation would come after more batches than an epoch has."""
    interval = cfg.trainer.val_check_interval
    if not isinstance(interval, int) or cfg.trainer.check_val_every_n_epoch is None:
        return
    try:
        num_batches = len(data.train_dataloader())
    except TypeError:
        return  # a stream, or several loaders: their length is not known
    if interval > num_batches:
        raise ConfigError(
            f"trainer.val_check_interval={interval}: must be at most the {num_batches} batches of "
            "an epoch"
        )


def check_arguments(cfg: DictConfig) -> None:
    """Compare every argument in ``cfg`` with what its constructor takes.

    Raises:
        ConfigError: naming the argument, the constructor and its nearest parameter.
    """
    for group in ("model", "data", "callbacks", "logger"):
        check_signatures(cfg[group], group)
    check_signatures(flags_of_lightning(cfg), "trainer")


def check_signatures(node: DictConfig, key: str) -> None:
    """Compare the arguments below ``node`` with what their constructors take."""
    for path, target_node in find_targets(node, key):
        target = str(target_node._target_)
        parameters = parameters_of(target, path)
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            continue
        given = [str(name) for name in target_node if not str(name).startswith("_")]
        check_names(given, [parameter.name for parameter in parameters], path, target)
        missing = [
            parameter.name
            for parameter in parameters
            if parameter.default is parameter.empty and parameter.name not in given
        ]
        if missing and not target_node.get("_partial_"):
            raise ConfigError(f"{path}: {target} needs a value for {', '.join(missing)}")


def parameters_of(target: str, path: str) -> list[inspect.Parameter]:
    """The parameters of the function or class ``target``."""
    try:
        function = get_object(target)
    except Exception as error:
        raise ConfigError(f"{path}._target_={target}: there is no such object") from error
    if not callable(function):
        raise ConfigError(f"{path}._target_={target}: must be a class or a function")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        raise ConfigError(f"{path}._target_={target}: does not say its arguments") from error
    return [parameter for parameter in parameters if parameter.name != "self"]


def check_names(given: list[str], names: list[str], path: str, target: str) -> None:
    """Raise a ConfigError for the first given argument that ``target`` does not take."""
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"{path}.{name}: {target} takes no argument {name!r}; {hint}"
                f"It takes {', '.join(names)}"
            )


def find_targets(node: Any, key: str) -> Iterator[tuple[str, DictConfig]]:
    """Every node below ``node`` that names a ``_target_``, and its key."""
    if OmegaConf.is_dict(node):
        if "_target_" in node:
            yield key, node
        for name in node:
            if not OmegaConf.is_interpolation(node, name):
                yield from find_targets(node[name], f"{key}.{name}")
    elif OmegaConf.is_list(node):
        for index, item in enumerate(node):
            yield from find_targets(item, f"{key}[{index}]")
