"""From the configuration to objects: the only place where Hydra's ``_target_`` is called."""

import inspect
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    Strategy,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf
from torch.nn.parallel import DistributedDataParallel

from samestep import loops
from samestep.callbacks.checkpoints import Checkpoints
from samestep.callbacks.checks import check_supported
from samestep.errors import ConfigError, RunError
from samestep.hydra.adapter import spec_of
from samestep.hydra.nodes import escape
from samestep.hydra.suggestions import did_you_mean
from samestep.loggers import NullLogger
from samestep.ranks import compat, environment
from samestep.ranks.process_group import (
    UnequalNodesDDP,
    on_all_ranks,
    options_of,
    topology,
)
from samestep.run.checkpoint import AtomicCheckpointIO
from samestep.run.history import History
from samestep.run_spec import RunSpec
from samestep.trainer import callbacks_of_run

# What a constructor raises when it rejects an argument.
REFUSALS = (ValueError, TypeError, LookupError, ImportError, MisconfigurationException)
# It logs what it also raises, and we print one line for that.
logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)


class Parts(NamedTuple):
    """What a run is made of."""

    model: L.LightningModule
    datamodule: L.LightningDataModule | None
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
        if parts.datamodule:
            is_first = environment.local_rank() == 0
            on_all_ranks(parts.datamodule.prepare_data if is_first else lambda: None)
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
    # A model may name what it logs. Without that a validation batch finds a wrong monitor.
    known = getattr(module, "metric_names", None)
    for key, monitor in monitors_of(cfg):
        if known is not None and monitor not in known:
            hint = did_you_mean("", monitor, known, " ")
            raise ConfigError(
                f"{key}={monitor}: the model logs no such metric;{hint} It logs {', '.join(known)}"
            )
    data = datamodule(cfg)
    owner = data or module  # Lightning does not ask the model where there is a DataModule
    if not is_overridden("train_dataloader", owner):
        hint = "" if data is None else ", or data=null for the loaders of the model"
        raise ConfigError(
            f"data: {type(owner).__name__} has no train_dataloader; choose data=NAME{hint}"
        )
    history = History(cfg.run_dir)
    parts = Parts(module, data, trainer(cfg, history), history)
    if known is not None and cfg.trainer.num_sanity_val_steps is None:
        parts.trainer.num_sanity_val_steps = 0
    return parts


def set_up_data(cfg: DictConfig, parts: Parts) -> None:
    """Open the data. Lightning does so when training begins, which is too late to reject."""
    if parts.datamodule is None:
        return
    parts.datamodule.trainer = parts.trainer
    with refusals("data"):
        parts.datamodule.setup("fit")
        interval = cfg.trainer.val_check_interval
        if isinstance(interval, int) and cfg.trainer.check_val_every_n_epoch is not None:
            # The length of a stream, or of several loaders, is not known.
            with suppress(TypeError):
                num_batches = len(parts.datamodule.train_dataloader())
                if interval > num_batches:
                    raise ConfigError(
                        f"trainer.val_check_interval={interval}: must be at most the "
                        f"{num_batches} batches of an epoch"
                    )
        if has_test(parts.model, parts.datamodule):
            check_share_of_test(cfg, parts)


def model(cfg: DictConfig) -> L.LightningModule:
    """The LightningModule of ``cfg.model``."""
    module: L.LightningModule = build(cfg.model, "model", L.LightningModule)
    set_precision(module, cfg.trainer.precision)
    return module


def set_precision(module: L.LightningModule, precision: Any) -> None:
    """Make the weights those of ``trainer.precision=64-true`` before a checkpoint is loaded.

    Lightning 2.6 would load it into 32 bits, and make them 64 bits afterwards.
    """
    if precision == "64-true":
        module.double()


def datamodule(cfg: DictConfig) -> L.LightningDataModule | None:
    """The DataModule of ``cfg.data``; nothing is read yet.

    There is none with ``data=null``: Lightning then takes the loaders of the model.
    """
    return build(cfg.data, "data", L.LightningDataModule) if cfg.data else None


def has_test(module: L.LightningModule, data: L.LightningDataModule | None) -> bool:
    """Whether there is something to test: a ``test_step``, and a ``test_dataloader``.

    The loader is the DataModule's, or without one the model's. Lightning would reject a model
    without these after it was trained.
    """
    has_data = is_overridden("test_dataloader", data or module)
    return bool(is_overridden("test_step", module) and has_data)


def trainer(cfg: DictConfig, history: History) -> L.Trainer:
    """The Trainer of ``cfg.trainer``, with the callbacks of every run and those of ``cfg``.

    Its loggers come later (``loggers``): they write files.
    """
    chosen = {
        name: build(node, f"callbacks.{name}", L.Callback)
        for name, node in (cfg.callbacks or {}).items()
    }
    for name, callback in chosen.items():
        check_supported(callback, f"callbacks.{name}")
        if isinstance(callback, ProgressBar):
            raise ConfigError(
                f"callbacks.{name}: leave it out; callbacks.progress draws a bar already"
            )
    spec = spec_of(cfg)
    accumulates = cfg.trainer.accumulate_grad_batches > 1
    monitors = dict(monitors_of(cfg))
    checkpoints = find_checkpoints(chosen, cfg.run_dir)
    callbacks = callbacks_of_run(
        spec, history, checkpoints, list(chosen.values()), monitors, accumulates
    )
    where = topology(spec)
    if isinstance(cfg.trainer.strategy, DictConfig):
        where["strategy"] = strategy(cfg, spec)
    num_sanity = cfg.trainer.num_sanity_val_steps
    arguments = {
        "callbacks": callbacks,
        "logger": False,
        "plugins": [AtomicCheckpointIO(), *where.pop("plugins", [])],
        # Lightning saves none of its own: ``Checkpoints`` is one to it.
        "enable_checkpointing": True,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 1 if num_sanity is None else num_sanity,
        "default_root_dir": cfg.run_dir,
        # Lightning leaves our loader alone, and shares the data of ordinary ones out.
        "use_distributed_sampler": True,
        **where,
    }
    lightning_trainer: L.Trainer = build(flags_of_lightning(cfg), "trainer", **arguments)
    # Lightning would ask the first logger for a folder, and a tracker may have none.
    profiler = lightning_trainer.profiler  # type: ignore[attr-defined]
    profiler.dirpath = profiler.dirpath or cfg.run_dir
    compat.apply(lightning_trainer)
    loops.install(lightning_trainer)
    return lightning_trainer


def strategy(cfg: DictConfig, spec: RunSpec) -> Strategy:
    """The strategy that ``cfg.trainer.strategy`` names by ``_target_``, with our options of DDP.

    Raises:
        ConfigError: if it saves in a way of its own, or is for one rank only. Other strategies
            that write files of their own are found by ``Checkpoints``.
    """
    node, key = cfg.trainer.strategy, f"trainer.strategy._target_={cfg.trainer.strategy._target_}"
    kind = get_object(node._target_)
    if not (isinstance(kind, type) and issubclass(kind, Strategy)):
        raise ConfigError(f"{key}: must be a Lightning Strategy")
    if issubclass(kind, DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy):
        raise ConfigError(
            f"{key}: its checkpoints cannot be verified, or read on other ranks; use "
            "trainer.strategy=fsdp, which shards weights, gradients and optimizer state"
        )
    if environment.world_size() > 1 and not issubclass(kind, ParallelStrategy):
        raise ConfigError(f"{key}: is for one rank, and there are {environment.world_size()}")

    names = set(inspect.signature(kind).parameters)
    options = options_of(kind, spec)
    if issubclass(kind, DDPStrategy):
        names |= set(inspect.signature(DistributedDataParallel).parameters)
        check_names([name for name in node if name[0] != "_"], sorted(names), key, node._target_)
    options = {name: value for name, value in options.items() if name in names and name not in node}
    if kind is DDPStrategy:
        node = {**node, "_target_": f"{UnequalNodesDDP.__module__}.UnequalNodesDDP"}
    made: Strategy = build(OmegaConf.create(node), "trainer.strategy", **options)
    return made


def find_checkpoints(chosen: dict[str, L.Callback], run_dir: str) -> Checkpoints | None:
    """The callback that saves, under any name; None if there is none."""
    found = {name: c for name, c in chosen.items() if isinstance(c, Checkpoints)}
    if len(found) > 1:
        names = " and ".join(f"callbacks.{name}" for name in found)
        raise ConfigError(f"{names}: a run has one Checkpoints; leave out the others")
    folder = Path(run_dir, "checkpoints")
    for name, checkpoints in found.items():
        if checkpoints.folder.resolve() != folder.resolve():
            raise ConfigError(
                f"callbacks.{name}.dirpath={checkpoints.folder}: a run continues from the "
                f"checkpoints in {folder}; leave it out, and choose another place for the whole "
                "run with run_root=..."
            )
        return checkpoints
    return None


def flags_of_lightning(cfg: DictConfig) -> DictConfig:
    """``cfg.trainer`` with the name of a strategy only: ``strategy`` makes one with options."""
    flags = OmegaConf.to_container(cfg.trainer, resolve=True)
    assert isinstance(flags, dict)
    flags.pop("split_batches", None)  # ours
    if isinstance(flags["strategy"], dict):
        flags["strategy"] = "auto"
    return OmegaConf.create(flags)


def loggers(cfg: DictConfig) -> list[Logger]:
    """The loggers of ``cfg.logger``; where there are none, and on other ranks, ``NullLogger``.

    The first of them is the ``self.logger`` of a module.
    """
    if environment.rank() > 0 or cfg.trainer.fast_dev_run or not cfg.logger:
        return [NullLogger(cfg.run_dir)]
    return [build(cfg.logger[name], f"logger.{name}") for name in cfg.logger]


def build(node: DictConfig, key: str, kind: type = object, **arguments: Any) -> Any:
    """Call the ``_target_`` of ``node``, which makes an object of this kind.

    What its constructor rejects is the user's to change.
    """
    # Hydra resolves every text twice, so that a literal ${...} becomes a reference after all. It
    # may not exist, and in the run of somebody else it could even be a node with a _target_.
    plain = OmegaConf.to_container(node, resolve=True)
    try:
        made = instantiate(escape(escape(plain)), _convert_="all", **arguments)
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, ConfigError):
            raise cause from error
        # Hydra itself rejects targets that could run any program, such as os.system.
        if isinstance(cause, (*REFUSALS, InstantiationException)):
            raise ConfigError(f"{key}: {node.get('_target_')} raised: {cause}") from error
        raise cause from error
    if not isinstance(made, kind):
        raise ConfigError(f"{key}._target_={node.get('_target_')}: must be a {kind.__name__}")
    return made


@contextmanager
def refusals(key: str) -> Iterator[None]:
    """Turn what Lightning raises for a wrong setting into a ConfigError that names ``key``."""
    try:
        yield
    except MisconfigurationException as error:
        raise ConfigError(f"{key}: {error}") from error
    except RuntimeError as error:
        # These two all ranks raise, and the user can set what they are about.
        text = str(error)
        if text.startswith("Early stopping conditioned on metric"):
            message = f"callbacks.early_stopping.monitor: {text}"
        elif "parameters that were not used in producing" in text:
            message = (
                "trainer.strategy: a step leaves some parameters of the model without a gradient, "
                "and DDP waits for them; use trainer.strategy=ddp_find_unused_parameters_true"
            )
        else:
            raise
        raise ConfigError(message) from error


def monitors_of(cfg: DictConfig) -> Iterator[tuple[str, str]]:
    """The key and the metric of each callback that monitors one."""
    for name, node in (cfg.callbacks or {}).items():
        if node.get("monitor") is not None:
            yield f"callbacks.{name}.monitor", str(node.monitor)


def check_share_of_test(cfg: DictConfig, parts: Parts) -> None:
    """Raise a ConfigError if a share of the test batches is none: Lightning does after training."""
    share = cfg.trainer.limit_test_batches
    if not isinstance(share, float) or not 0 < share < 1:
        return
    if parts.datamodule:
        parts.datamodule.setup("test")
    loaders = (parts.datamodule or parts.model).test_dataloader()
    for loader in loaders if isinstance(loaders, list | tuple) else [loaders]:
        try:
            num_batches = len(loader)
        except TypeError:
            raise ConfigError(
                f"trainer.limit_test_batches={share}: the number of test batches is unknown; "
                "use a whole number"
            ) from None
        if int(num_batches * share) == 0:
            raise ConfigError(
                f"trainer.limit_test_batches={share}: selects none of the {num_batches} test "
                "batches; use a larger share, or a whole number"
            )


def check_arguments(cfg: DictConfig) -> None:
    """Compare every argument in ``cfg`` with what its constructor takes."""
    for group in ("model", "data", "callbacks", "logger"):
        check_signatures(cfg[group], group)
    check_signatures(flags_of_lightning(cfg), "trainer")
    if isinstance(cfg.trainer.strategy, DictConfig):
        check_signatures(cfg.trainer.strategy, "trainer.strategy")


def check_signatures(node: DictConfig, key: str) -> None:
    """Compare the arguments below ``node`` with what their constructors take."""
    for path, target_node in find_targets(node, key):
        target = str(target_node._target_)
        function = locate(target, path)
        if not callable(function):
            raise ConfigError(f"{path}._target_={target}: must be a class or a function")
        try:
            signature = inspect.signature(function)
        except ValueError as error:
            raise ConfigError(f"{path}._target_={target}: does not say its arguments") from error
        parameters = [one for name, one in signature.parameters.items() if name != "self"]
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


def locate(target: str, path: str) -> Any:
    """The object that ``path._target_`` names; an error says what is missing, or where it fails."""
    try:
        return get_object(target)
    except Exception as error:
        cause, why = error.__cause__, "there is no such object"
        if isinstance(cause, ModuleNotFoundError) and cause.name:
            name = cause.name.partition(".")[0]
            if name == cause.name or not f"{target}.".startswith(f"{cause.name}."):
                why = (
                    f"the module {cause.name} is missing; if it is a package, `pip install {name}` "
                    "and add it to the dependencies in pyproject.toml"
                )
        elif cause and (place := traceback.extract_tb(cause.__traceback__)[-1]).name != "_locate":
            # Not Hydra's search has failed, but what it has imported.
            where = "" if isinstance(cause, SyntaxError) else f" ({place.filename}:{place.lineno})"
            why = f"cannot be imported: {type(cause).__name__}: {cause}{where}"
        raise ConfigError(f"{path}._target_={target}: {why}") from error


def check_names(given: list[str], names: list[str], path: str, target: str) -> None:
    """Reject the first given argument that ``target`` does not take."""
    for name in given:
        if name not in names:
            hint = did_you_mean("", name, names, " ")
            raise ConfigError(
                f"{path}.{name}: {target} takes no argument {name!r};{hint} "
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
