"""From a DictConfig to the arguments of ``samestep.Trainer``, a model and its data.

Here alone Hydra's ``_target_`` is called. What a run is made of beyond that, ``samestep.Trainer``
knows.
"""

import inspect
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any

import lightning as L
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf
from torch.nn.parallel import DistributedDataParallel

from samestep.callbacks.trainjob import TrainJobProgress
from samestep.errors import ConfigError
from samestep.hydra.front_end import front_end_of
from samestep.hydra.nodes import escape
from samestep.hydra.suggestions import did_you_mean
from samestep.ranks import environment, process_group, strategies
from samestep.run.logs import mute_lightning
from samestep.trainer import Trainer, distributed_session

# What a constructor raises when it rejects an argument.
USER_ERRORS = (ValueError, TypeError, LookupError, ImportError, MisconfigurationException)
NO_SUCH_OBJECT = "there is no such object"
# It logs what it also raises, and we print one line for that.
logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)

Run = tuple[Trainer, L.LightningModule, L.LightningDataModule | None]


def build_run(cfg: DictConfig, overrides: Sequence[str] = ()) -> Run:
    """The Trainer, the model and the data of ``cfg``; nothing is read or written yet.

    Every rank must call this. What fails on one rank fails on all of them.

    Args:
        cfg: the checked configuration; its ``run_id`` is set.
        overrides: what made it from the defaults, for the records.

    Raises:
        ConfigError: if a constructor rejects an argument.
    """
    mute_lightning()
    with distributed_session(cfg.trainer.accelerator, cfg.cluster.timeout_s):
        # Each rank may have made up its own.
        cfg.run_id = process_group.broadcast(cfg.run_id)
        return process_group.on_all_ranks(_build, cfg, overrides)


def _build(cfg: DictConfig, overrides: Sequence[str]) -> Run:
    # The module of a model may draw random numbers when it is imported, such as the weights of an
    # argument's default.
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    check_arguments(cfg)
    # First the Trainer, which seeds the weights of the model.
    trainer = build_trainer(cfg, overrides)
    model, data = build_model(cfg), build_datamodule(cfg)
    # Lightning does not ask the model for loaders where there is a DataModule.
    owner = model if data is None else data
    if not is_overridden("train_dataloader", owner):
        hint = "" if data is None else ", or data=null for the loaders of the model"
        raise ConfigError(
            f"data: {type(owner).__name__} has no train_dataloader; choose data=NAME{hint}"
        )
    return trainer, model, data


def build_model(cfg: DictConfig) -> L.LightningModule:
    """The LightningModule of ``cfg.model``."""
    model: L.LightningModule = build(cfg.model, "model", L.LightningModule)
    return model


def build_datamodule(cfg: DictConfig) -> L.LightningDataModule | None:
    """The DataModule of ``cfg.data``; nothing is read yet.

    There is none with ``data=null``: Lightning then takes the loaders of the model.
    """
    return build(cfg.data, "data", L.LightningDataModule) if cfg.data else None


def build_trainer(cfg: DictConfig, overrides: Sequence[str] = ()) -> Trainer:
    """The Trainer of ``cfg.trainer``, with the callbacks of ``cfg.callbacks``.

    Its loggers come when the run has begun: they write files.
    """
    callbacks = build_group(cfg, "callbacks", L.Callback)
    own = list(callbacks.values())
    if environment.variable(environment.TRAINJOB_SERVER):
        own.append(TrainJobProgress())
    strategy = build_strategy(cfg)
    flags: Any = OmegaConf.to_container(cfg.trainer, resolve=True)
    cluster: Any = OmegaConf.to_container(cfg.cluster, resolve=True)
    del flags["strategy"]
    # Hydra would make a configuration of the RunSpec, so it only fills in the flags.
    make_trainer = build(OmegaConf.create({**flags, "_partial_": True}), "trainer")
    with rejections("trainer", str(cfg.trainer._target_)):
        trainer: Trainer = make_trainer(
            run_dir=cfg.run_dir,
            seed=cfg.seed,
            allow_changes=list(cfg.allow_changes),
            timeout_s=cfg.cluster.timeout_s,
            shares=cluster["shares"],
            callbacks=own,
            strategy=strategy,
            # callbacks.progress shows how far a run has come.
            enable_progress_bar=False,
            enable_model_summary=False,
            run=front_end_of(cfg, overrides, callbacks, partial(build_loggers, cfg)),
        )
    return trainer


def build_strategy(cfg: DictConfig) -> Any:
    """The strategy of ``cfg.trainer``: its name, or what it names by ``_target_``."""
    node = cfg.trainer.strategy
    if not isinstance(node, DictConfig):
        return node
    kind = get_object(node._target_)
    key = f"trainer.strategy._target_={node._target_}"
    if not is_subclass(kind, Strategy):
        raise ConfigError(f"{key}: must be a Lightning Strategy")
    # Before it is built: DeepSpeed would say first that its package is missing.
    strategies.check_kind(kind)
    if issubclass(kind, DDPStrategy):
        # It takes any argument, and hands those that it does not know to DDP.
        names = {*inspect.signature(kind).parameters}
        names |= {*inspect.signature(DistributedDataParallel).parameters}
        check_names(arguments_of(node), sorted(names), key, node._target_)
    return build(node, "trainer.strategy", Strategy)


def build_loggers(cfg: DictConfig) -> list[Logger]:
    """The loggers of ``cfg.logger``. The first of them is the ``self.logger`` of a module."""
    return list(build_group(cfg, "logger").values())


def build_group(cfg: DictConfig, group: str, kind: type = object) -> dict[str, Any]:
    """Build every node of a group, such as ``callbacks``, by its name."""
    built = {}
    for name, node in cfg[group].items():
        built[name] = build(node, f"{group}.{name}", kind)
    return built


def build(node: DictConfig, key: str, kind: type = object) -> Any:
    """Call the ``_target_`` of ``node``, which makes an object of this kind.

    What its constructor rejects is the user's to change.
    """
    target = str(node.get("_target_"))
    # Hydra resolves every text twice, so that a literal ${...} becomes a reference after all. It
    # may not exist, and in a saved run from elsewhere it could even be a node with a _target_.
    values = OmegaConf.to_container(node, resolve=True)
    with rejections(key, target):
        made = instantiate(escape(escape(values)), _convert_="all")
    if not isinstance(made, kind):
        raise ConfigError(f"{key}._target_={target}: must be a {kind.__name__}")
    return made


@contextmanager
def rejections(key: str, target: str) -> Iterator[None]:
    """Turn what a constructor raises for a wrong argument into a ConfigError that names ``key``."""
    try:
        yield
    except (InstantiationException, *USER_ERRORS) as error:
        is_wrapped = isinstance(error, InstantiationException) and error.__cause__ is not None
        cause = error.__cause__ if is_wrapped else error
        assert cause is not None
        if isinstance(cause, ConfigError):
            raise cause from error
        # Hydra itself rejects targets that could run any program, such as os.system.
        if isinstance(cause, (*USER_ERRORS, InstantiationException)):
            raise ConfigError(f"{key}: {target} raised: {cause}") from error
        raise cause from error


def check_arguments(cfg: DictConfig) -> None:
    """Compare every argument in ``cfg`` with what its constructor takes."""
    for group in ("model", "data", "callbacks", "logger"):
        check_signatures(cfg[group], group)
    check_trainer(cfg.trainer)


def check_trainer(node: DictConfig) -> None:
    """Compare the flags in ``node`` with the arguments of its Trainer, and of Lightning's."""
    target = str(node._target_)
    kind = locate(target, "trainer")
    if not is_subclass(kind, Trainer):
        raise ConfigError(f"trainer._target_={target}: must be samestep.Trainer, or a subclass")
    names = {*inspect.signature(kind).parameters, *inspect.signature(L.Trainer).parameters}
    given = arguments_of(node)
    check_names(given, sorted(names - {"options"}), "trainer", target)
    for name in given:
        check_signatures(node[name], f"trainer.{name}")


def check_signatures(node: DictConfig, key: str) -> None:
    """Compare the arguments below ``node`` with what their constructors take."""
    for path, target_node in find_targets(node, key):
        target = str(target_node._target_)
        parameters = parameters_of(target, path)
        kinds = [parameter.kind for parameter in parameters.values()]
        if inspect.Parameter.VAR_KEYWORD in kinds:
            continue
        given = arguments_of(target_node)
        check_names(given, [*parameters], path, target)
        if not target_node.get("_partial_"):
            by_position = positional_arguments(target_node, parameters, path, target)
            check_required([*by_position, *given], parameters, path, target)


def positional_arguments(
    node: DictConfig, parameters: Mapping[str, inspect.Parameter], path: str, target: str
) -> list[str]:
    """The parameters that get a value of ``_args_``, Hydra's list of arguments by position."""
    num = len(node.get("_args_") or ())
    names = []
    takes_any_number = False
    for name, parameter in parameters.items():
        # Such as the layers of a Sequential.
        if parameter.kind is parameter.VAR_POSITIONAL:
            takes_any_number = True
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            names.append(name)
    if num > len(names) and not takes_any_number:
        raise ConfigError(
            f"{path}._args_: {target} takes {len(names)} arguments by position, not {num}"
        )
    return names[:num]


def parameters_of(target: str, path: str) -> Mapping[str, inspect.Parameter]:
    """The parameters of what ``path._target_`` names."""
    function = locate(target, path)
    if not callable(function):
        raise ConfigError(f"{path}._target_={target}: must be a class or a function")
    try:
        return inspect.signature(function).parameters
    except ValueError as error:
        raise ConfigError(f"{path}._target_={target}: does not say its arguments") from error


def arguments_of(node: DictConfig) -> list[str]:
    """The arguments that ``node`` has for its ``_target_``: all keys but Hydra's own."""
    return [str(name) for name in node if not str(name).startswith("_")]


def is_subclass(found: Any, kind: type) -> bool:
    """Whether ``found``, which may be any object, is a class of this kind."""
    return isinstance(found, type) and issubclass(found, kind)


def locate(target: str, path: str) -> Any:
    """The object that ``path._target_`` names; an error says what is missing, or where it fails."""
    try:
        return get_object(target)
    except Exception as error:
        why = why_not_located(target, error.__cause__)
        module, _, name = target.rpartition(".")
        # Unlike our keys, names in Python differ in their case too.
        near = get_close_matches(name, getattr(sys.modules.get(module), "__dict__", ()), n=1)
        if why == NO_SUCH_OBJECT and near:
            why += f"; did you mean {module}.{near[0]}?"
        raise ConfigError(f"{path}._target_={target}: {why}") from error


def why_not_located(target: str, cause: BaseException | None) -> str:
    """Why Hydra did not find ``target``; ``cause`` is what it raised on its way, if anything."""
    if cause is None:
        return NO_SUCH_OBJECT
    if isinstance(cause, ModuleNotFoundError) and cause.name:
        package = cause.name.partition(".")[0]
        is_part_of_target = f"{target}.".startswith(f"{cause.name}.")
        if is_part_of_target and package != cause.name:
            return NO_SUCH_OBJECT
        return (
            f"the module {cause.name} is missing; if it is a package, `pip install {package}` "
            "and add it to the dependencies in pyproject.toml"
        )
    place = traceback.extract_tb(cause.__traceback__)[-1]
    # Then Hydra's own search has failed, and nothing that it has imported.
    if place.name == "_locate":
        return NO_SUCH_OBJECT
    message = f"cannot be imported: {type(cause).__name__}: {cause}"
    # A SyntaxError names its place itself; the traceback ends in Python's importer.
    if isinstance(cause, SyntaxError):
        return message
    return f"{message} ({place.filename}:{place.lineno})"


def check_required(
    given: list[str], parameters: Mapping[str, inspect.Parameter], path: str, target: str
) -> None:
    """Reject a node that lacks arguments of ``target`` without a default."""
    missing = []
    for name, parameter in parameters.items():
        is_needed = parameter.default is parameter.empty
        if is_needed and parameter.kind is not parameter.VAR_POSITIONAL and name not in given:
            missing.append(name)
    if missing:
        raise ConfigError(f"{path}: {target} needs a value for {', '.join(missing)}")


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
