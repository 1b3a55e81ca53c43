"""From the configuration to objects: the only place where Hydra's ``_target_`` is called."""

import difflib
import inspect
from collections.abc import Iterator
from typing import Any

import lightning as L
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from project.data.datamodule import ImageDataModule
from project.model.classifier import ImageClassifier
from samestep.callbacks.schedule_length import ScheduleLength
from samestep.callbacks.watchdog import Watchdog
from samestep.errors import ConfigError
from samestep.ranks import environment
from samestep.ranks.process_group import topology
from samestep.run.checkpoint import AtomicCheckpointIO
from samestep.run.history import History


def check(cfg: DictConfig) -> None:
    """Compare every argument in ``cfg`` with what its constructor takes.

    Raises:
        ConfigError: naming the argument, the constructor and its nearest parameter.
    """
    for group in ("model", "data", "trainer", "callbacks", "logger"):
        check_signatures(cfg[group], group)


def model(cfg: DictConfig) -> ImageClassifier:
    """The LightningModule of ``cfg.model``.

    Raises:
        ConfigError: if a constructor refuses its values; the optimizer's and the schedule's
            included, which Lightning would only build after the data.
    """
    classifier: ImageClassifier = build(cfg.model, "model")
    try:
        classifier.build_optimizer(total_steps=100)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"model.optimizer, model.lr_scheduler: {error}") from error
    return classifier


def datamodule(cfg: DictConfig) -> ImageDataModule:
    """The DataModule of ``cfg.data``; nothing is read yet."""
    data: ImageDataModule = build(cfg.data, "data")
    return data


def trainer(cfg: DictConfig, history: History) -> L.Trainer:
    """The Trainer of ``cfg.trainer``, with the callbacks and loggers of the run.

    Loggers other than ``history`` exist on rank zero only.
    """
    callbacks: list[L.Callback] = [
        history,
        Watchdog(cfg.cluster.timeout_s, cfg.run_dir),
        ScheduleLength(),
    ]
    callbacks += [build(cfg.callbacks[name], f"callbacks.{name}") for name in cfg.callbacks]
    loggers: list[Logger] = [history]
    if environment.rank() == 0 and not cfg.trainer.fast_dev_run:
        loggers += [build(cfg.logger[name], f"logger.{name}") for name in cfg.logger]
    arguments = {
        "callbacks": callbacks,
        "logger": loggers,
        "plugins": [AtomicCheckpointIO()],
        **topology(cfg),
    }
    lightning_trainer: L.Trainer = build(cfg.trainer, "trainer", **arguments)
    # Lightning's handler of SIGTERM talks to other ranks in the middle of a step, which hangs, and
    # each step waits for a broadcast of what it heard. Ours is in samestep.ranks.stopping.
    lightning_trainer._signal_connector.register_signal_handlers = _nothing  # type: ignore[method-assign]
    lightning_trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]
    return lightning_trainer


def _nothing() -> None:
    pass


def build(node: DictConfig, key: str, **arguments: Any) -> Any:
    """Call the ``_target_`` of ``node``; what its constructor refuses is the user's to change."""
    try:
        return instantiate(node, _convert_="all", **arguments)
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, (ValueError, TypeError, ImportError, MisconfigurationException)):
            raise ConfigError(f"{key}: {node.get('_target_')} refuses: {cause}") from error
        raise cause from error


def check_signatures(node: DictConfig, key: str) -> None:
    """Compare the arguments below ``node`` with what their constructors take."""
    for path, target_node in targets(node, key):
        target = str(target_node._target_)
        try:
            function = get_object(target)
        except Exception as error:
            raise ConfigError(f"{path}._target_={target}: there is no such object") from error
        parameters = inspect.signature(function).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            continue
        names = [parameter.name for parameter in parameters if parameter.name != "self"]
        given = [str(name) for name in target_node if not str(name).startswith("_")]
        for name in given:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ConfigError(
                    f"{path}.{name}: {target} takes no argument {name!r}; {hint}"
                    f"It takes {', '.join(names)}"
                )
        missing = [
            parameter.name
            for parameter in parameters
            if parameter.default is parameter.empty and parameter.name not in {"self", *given}
        ]
        if missing and not target_node.get("_partial_"):
            raise ConfigError(f"{path}: {target} needs a value for {', '.join(missing)}")


def targets(node: Any, key: str) -> Iterator[tuple[str, DictConfig]]:
    """Every node below ``node`` that names a ``_target_``, and its key."""
    if OmegaConf.is_dict(node):
        if "_target_" in node:
            yield key, node
        for name in node:
            if not OmegaConf.is_interpolation(node, name):
                yield from targets(node[name], f"{key}.{name}")
    elif OmegaConf.is_list(node):
        for index, item in enumerate(node):
            yield from targets(item, f"{key}[{index}]")
