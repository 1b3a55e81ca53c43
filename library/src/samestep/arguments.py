"""Arguments of ``samestep.Trainer``: what is missing is completed, what has no effect is said."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO

from samestep.callbacks.checkpoints import Checkpoints, check_mode, place_model_checkpoint
from samestep.callbacks.loss_guard import LossGuard
from samestep.errors import ConfigError
from samestep.option_names import option, setting
from samestep.ranks import environment, strategies
from samestep.ranks.compat import of_kind
from samestep.run.layout import shorten
from samestep.run.save_interval import Seconds


def as_list(value: Any) -> list[Any]:
    """What Lightning takes as one object, as several, or as None."""
    if value is None:
        return []
    # Hydra passes a ListConfig, which is no list. A text is one object, such as a plugin's name.
    if isinstance(value, Iterable) and not isinstance(value, (str, L.Callback)):
        return [*value]
    return [value]


def check_options(options: Mapping[str, Any]) -> None:
    """Raise a ConfigError for the first argument that contradicts what a run is."""
    strategies.check(options["strategy"])
    check_mode(options["monitor"], options["mode"])


def take_unused(
    options: dict[str, Any], plugins: Any, run_dir: Path
) -> tuple[list[Any], dict[str, str]]:
    """Remove what tutorials and libraries always pass, and what a run decides itself.

    Returns:
        The plugins that remain, and of each removed argument what is used in its place.
    """
    unused = {}
    folder = options.pop("default_root_dir", None)
    # One value of a configuration may name both.
    if folder is not None and Path(folder).absolute() != run_dir:
        unused["default_root_dir"] = f"the run writes to run_dir, {shorten(run_dir)}"
    if options.pop("enable_checkpointing", None) is False:
        unused["enable_checkpointing"] = "the run saves, because it continues from its checkpoints"
    remaining = []
    for plugin in as_list(plugins):
        if isinstance(plugin, CheckpointIO):
            unused[type(plugin).__name__] = "the run writes and reads its checkpoints itself"
        else:
            remaining.append(plugin)
    return remaining, unused


_noted: set[str] = set()  # arguments that this process has named; a library builds many Trainers


def note_unused(unused: Mapping[str, str]) -> None:
    """Name the arguments that have no effect, once in a program."""
    new = [f"{name} ({why})" for name, why in unused.items() if name not in _noted]
    _noted.update(unused)
    if new and environment.rank() == 0:
        print(f"Note: these arguments have no effect: {', '.join(new)}", flush=True)


def place_callbacks(callbacks: Sequence[L.Callback], run_dir: Path) -> None:
    """Give checkpoints and files of the user's callbacks a place beside those of the run."""
    for saver in of_kind(callbacks, ModelCheckpoint):
        place_model_checkpoint(saver, run_dir)
    for saver_of_config in savers_of_config(callbacks):
        # The run has a config.yaml of its own, and the same command resumes.
        saver_of_config.config_filename = "cli.yaml"
        saver_of_config.overwrite = True


def savers_of_config(callbacks: Iterable[L.Callback]) -> list[Any]:
    """The callbacks of LightningCLI that save its configuration, also the user's subclasses."""
    # Importing it takes most of a second, and who has one has imported it.
    cli = sys.modules.get("lightning.pytorch.cli")
    return of_kind(callbacks, getattr(cli, "SaveConfigCallback", ()))  # type: ignore[arg-type]


def complete_callbacks(
    own: Sequence[L.Callback],
    run_dir: Path,
    save_every_s: Seconds,
    monitor: str | None,
    mode: str | None,
) -> list[L.Callback]:
    """The user's callbacks, with a saver of checkpoints and a LossGuard.

    A Checkpoints or LossGuard of the user takes the place of the default one.

    Raises:
        ConfigError: if there are two savers, or the user's saves elsewhere.
    """
    folder = run_dir / "checkpoints"
    savers = of_kind(own, Checkpoints)
    if len(savers) > 1:
        raise ConfigError("callbacks: a run has one Checkpoints; leave out the others")
    if not savers:
        checkpoints = Checkpoints(str(folder), save_every_s, monitor, mode)
        chosen: list[L.Callback] = [checkpoints, *own]
    else:
        (checkpoints,), chosen = savers, [*own]
        if checkpoints.folder.resolve() != folder.resolve():
            raise ConfigError(
                f"{option('Checkpoints.dirpath')}={checkpoints.folder}: a run continues from the "
                f"checkpoints in {folder}; leave it out, or choose another {option('run_dir')}"
            )
        if monitor is not None:
            raise ConfigError(
                f"{setting('monitor', monitor)}: is not supported beside a Checkpoints in "
                "callbacks; give it to that"
            )
    if not of_kind(own, LossGuard):
        chosen.insert(1, LossGuard(0))
    return chosen


def trackers_of(logger: Logger | Iterable[Logger] | bool | None) -> list[Logger]:
    """The trackers that the user gives; True would be Lightning's own, and there is metrics.csv."""
    if isinstance(logger, bool):
        return []
    return as_list(logger)


def limits_of(callbacks: Iterable[L.Callback], options: Mapping[str, Any]) -> dict[str, Any]:
    """What may end the run. A finished run continues when one of them is raised."""
    limits = {name: value for name, value in options.items() if name.startswith("max_")}
    for stopping in of_kind(callbacks, EarlyStopping):
        limits[f"patience of {stopping.monitor}"] = stopping.patience
    return limits
