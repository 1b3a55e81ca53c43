"""Plug-ins: what looks at a run, reports of it or knows a third party. The core imports none.

A plug-in is a module, or an object, that has some of these functions:

- ``callback(spec)``: a callback for a run, or None where it has nothing to do. ``Plugin`` has hooks
  that Lightning's callbacks have not.
- ``start_ranks(spec, num_nodes)``: may replace this process before it becomes a rank.
- ``before_meeting(accelerator)``: called on each rank before it meets the others.
- ``before_run(spec, model, data)``: called on each rank before anything is written.
- ``note_start(spec, starts, first_step)``: adds facts to the newest of the starts in ``run.json``,
  on rank zero, when a run begins or continues.
- ``epoch_loop(kind)``: the class of the loop over an epoch, one that inherits from ``kind``.
- ``change(given)``: the arguments of ``samestep.Trainer``, ``Given``, as it wants them.
- ``loggers(given, run_dir)``: ``Loggers`` for those loggers of a run that it knows, or None.

Those of this library are in ``samestep.plugins``. Another distribution names its own::

    [project.entry-points."samestep.plugins"]
    energy = "energy_meter"

and the variable ``SAMESTEP_PLUGIN`` names one more, for one program.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.loggers import Logger

from samestep.errors import ConfigError
from samestep.ranks import environment
from samestep.run_spec import RunSpec

GROUP = "samestep.plugins"
OF_EVERY_RUN = (
    "starting", "fast_step", "needed_names", "preflight", "measured_shares", "checks",
    "compiled_code", "data_of_ranks", "loss_check", "monitor_check", "notices", "provenance",
    "wall_time", "slow_ranks", "epoch_means", "run_stats", "save_time", "receipts",
)  # fmt: skip
"""Those of this library, in the order in which they act; each decides itself whether it does.

What the first ones do before a step is no time of the step, which those behind them measure.
"""
OF_LOGGERS = {
    f"lightning.pytorch.loggers.{module}": "samestep.plugins.trackers"
    for module in ("csv_logs", "mlflow", "tensorboard", "wandb")
}
"""The plug-ins of loggers, by the module that defines these: other runs import none."""


class Given(NamedTuple):
    """The arguments of ``samestep.Trainer`` that a plug-in may change."""

    run_dir: Path
    run: Any
    accelerator: str
    devices: Any
    num_nodes: int
    callbacks: Any
    logger: Any
    allow: Sequence[str]
    options: dict[str, Any]


class Plugin(L.Callback):
    """A callback with hooks for what Lightning tells nobody."""

    def on_batch_read(self, trainer: Any, batch_idx: int, batch: Any) -> None:
        """Called with each training batch as it was read, before it is moved to a device.

        Args:
            trainer: of the run.
            batch_idx: the number of the batch in its epoch, from 0.
            batch: what the loader has given; None where ``training_step`` reads for itself.
        """

    def find_problem(self, trainer: Any, checkpoint: dict[str, Any]) -> str | None:
        """Called on rank zero with a first checkpoint, which is not written.

        Returns:
            Why no run could continue from it, which ends this one; None if nothing is wrong.
        """
        return None

    def on_saved(self, trainer: Any, began: float, writer: "Future[Any] | None") -> None:
        """Called when a checkpoint of the run is saved.

        Args:
            trainer: of the run.
            began: when the save did, by ``time.monotonic``.
            writer: the thread that still writes it; None if it is written.
        """

    def on_step_rehearsed(self, trainer: Any) -> None:
        """Called when a run that is stopped has computed its next step, and is saved by then."""


class Loggers:
    """Loggers of a run that a plug-in knows: they go on where the run has logged before."""

    def take_places(self) -> None:
        """Called when the loggers are made, on each rank that has them."""

    def resume(self, ckpt_path: str | None) -> None:
        """Called before training begins, on rank zero.

        Args:
            ckpt_path: from which the run continues; None where it begins.
        """

    def note_evaluation(self, stage: str) -> None:
        """Called when ``validate``, ``test`` or ``predict`` has logged, on rank zero."""

    def is_repeated(self, stage: str) -> bool:
        """Whether the trackers have the results of an evaluation already; on rank zero."""
        return False


def make_callbacks(spec: RunSpec) -> list[L.Callback]:
    """The callbacks that plug-ins have for this run."""
    made = (plugin.callback(spec) for plugin in find("callback"))
    return [callback for callback in made if callback is not None]


def change(given: Given) -> Given:
    """The arguments of the Trainer, as plug-ins want them."""
    for plugin in find("change"):
        given = plugin.change(given)
    return given


def call(function: str, *arguments: Any) -> None:
    """Call this function of every plug-in that has it."""
    for plugin in find(function):
        getattr(plugin, function)(*arguments)


def loggers_of(given: Sequence[Logger], run_dir: Path) -> list[Loggers]:
    """What plug-ins do for loggers of a run."""
    modules = {kind.__module__ for logger in given for kind in type(logger).__mro__}
    own = {OF_LOGGERS[module] for module in modules & OF_LOGGERS.keys()}
    plugins = [*map(import_module, own), *find("loggers")]
    made = [plugin.loggers(given, run_dir) for plugin in plugins]
    return [loggers for loggers in made if loggers is not None]


def find(function: str) -> Iterator[Any]:
    """The plug-ins that have a function."""
    for plugin in load(environment.variable(environment.PLUGIN)):
        if hasattr(plugin, function):
            yield plugin


@cache
def load(named: str | None) -> list[Any]:
    """All plug-ins.

    Raises:
        ConfigError: if one cannot be imported.
    """
    values = [f"{GROUP}.{name}" for name in OF_EVERY_RUN] + ([named] if named else [])
    entries = [metadata.EntryPoint(value, value, GROUP) for value in values]
    loaded = []
    for entry in [*entries, *metadata.entry_points(group=GROUP)]:
        try:
            loaded.append(entry.load())
        # Code of others runs here.
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"plug-in {entry.name}: {entry.value} cannot be imported ({why}); install it "
                "again, or uninstall it"
            ) from error
    return loaded
