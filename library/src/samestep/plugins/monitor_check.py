"""Rejects a monitor that validation does not log, before training begins."""

import re
import sys
from functools import cache
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import RunningStage

from samestep.callbacks.checkpoints import Checkpoints, or_infinite
from samestep.callbacks.notes import print_note
from samestep.errors import ConfigError
from samestep.option_names import option, setting
from samestep.ranks.compat import callbacks_of
from samestep.run_spec import RunSpec


def callback(spec: RunSpec) -> L.Callback:
    """``MonitorCheck``, for every run."""
    return MonitorCheck()


class MonitorCheck(L.Callback):
    """Compares each monitor with what one batch of validation logs, before training begins.

    Lightning skips this batch if a run resumes. Only monitors with ``val`` in their name, or that
    begin with ``test``, are compared: others may be logged by training.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that weights are validated which a checkpoint can hold."""
        for checkpoints in callbacks_of(trainer, Checkpoints):
            if checkpoints.monitor is not None:
                check_validations(trainer, checkpoints.monitor)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find out whether the module logs something else in this first validation."""
        watch_sanity_checks()
        vars(trainer)["module_knows_sanity_checks"] = False

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reject the monitors that validation does not log.

        Raises:
            ConfigError: with the metrics that it logs.
        """
        logged = sorted(trainer.callback_metrics)
        # Some models log nothing in this first validation, or other metrics, which says nothing
        # about later ones. ``Checkpoints`` rejects a wrong monitor after the first epoch then.
        if not logged or vars(trainer).get("module_knows_sanity_checks"):
            return
        # Some name them after the stage: pytorch-forecasting's sanity_check_loss is val_loss later.
        stage = RunningStage.SANITY_CHECKING.value
        if stage in " ".join(logged):
            return
        wrong = []
        for key, monitor in find_monitors(trainer).items():
            is_of_validation = re.search("val|^test", monitor, re.IGNORECASE)
            if monitor not in logged and is_of_validation:
                wrong.append(f"{key}={monitor}")
        if wrong:
            raise ConfigError(
                f"{', '.join(wrong)}: validation logs {', '.join(logged)}; choose one of these, "
                f"and its mode. {setting('monitor', None)} tests the last weights. If the metric "
                f"is only logged later, add {setting('num_sanity_val_steps', 0)}"
            )


def find_monitors(trainer: Any) -> dict[str, str]:
    """The metrics that callbacks and schedules monitor, by the arguments that name them."""
    monitors: dict[str, str] = {}
    for callback in trainer.callbacks:
        metric = getattr(callback, "monitor", None)
        if isinstance(metric, str):
            # The Trainer has the arguments of ``Checkpoints``.
            of_trainer = isinstance(callback, Checkpoints)
            name = "monitor" if of_trainer else f"{type(callback).__name__}.monitor"
            monitors[option(name)] = metric
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau:
            name = type(config.scheduler).__name__
            monitors[f"the schedule {name}, monitor"] = str(config.monitor)
    return monitors


@cache  # once in a process, which may have several runs
def watch_sanity_checks() -> None:
    """Let a Trainer know whether a module has asked it if this is the sanity check.

    Lightning 2.6 has one public property for that, and asks it itself. What such a module does in
    the sanity check says nothing about its validations.
    """
    asked: Any = L.Trainer.sanity_checking

    def is_sanity_check(trainer: L.Trainer) -> bool:
        is_checking = bool(asked.fget(trainer))
        if is_checking:
            asker = sys._getframe(1)
            package = asker.f_globals.get("__name__", "").partition(".")[0]
            # Callbacks log for themselves, and a progress bar asks in each run.
            is_callback = isinstance(asker.f_locals.get("self"), L.Callback)
            if package not in ("lightning", "samestep") and not is_callback:
                vars(trainer)["module_knows_sanity_checks"] = True
        return is_checking

    L.Trainer.sanity_checking = property(is_sanity_check, asked.fset)  # type: ignore[method-assign, assignment]


def check_validations(trainer: L.Trainer, monitor: str) -> None:
    """Reject validations within a step; say if there are none to find the best weights."""
    interval = trainer.val_check_batch or 0
    is_within_epoch = interval < trainer.num_training_batches
    if is_within_epoch and interval % trainer.accumulate_grad_batches:
        # The checkpoint of a best validation would hold half of a step.
        raise ConfigError(
            f"{option('val_check_interval')}: a validation after {interval} batches comes "
            f"within an optimizer step of {trainer.accumulate_grad_batches} batches "
            f"({option('accumulate_grad_batches')}); choose a multiple of it"
        )
    is_validation_metric = "val" in monitor.lower()
    if is_validation_metric and never_validates(trainer):
        print_note(
            trainer,
            f"Note: this run never validates, and nothing logs {monitor}, so the last weights "
            "are tested, not the best ones",
        )


def never_validates(trainer: L.Trainer) -> bool:
    """Whether no validation can take place with these settings."""
    # None counts batches over all epochs.
    every_n = trainer.check_val_every_n_epoch or 0
    ends_before = or_infinite(trainer.max_epochs) < every_n
    has_no_batches = trainer.val_dataloaders is not None and not sum(trainer.num_val_batches)
    return ends_before or has_no_batches or not trainer.enable_validation
