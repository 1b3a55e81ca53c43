"""Stop, save, link, repair: how a run keeps the checkpoints from which it continues.

- **Stop.** Before each optimizer step all ranks ask each other (``StopBetweenSteps``, the first
  callback of every run): go on, save, or stop.
- **Save.** ``LastCheckpoint``, the last callback, saves ``last.ckpt`` there and at the end of each
  epoch. Nothing else is ever written.
- **Link.** If the saved weights are the best ones (``BestCheckpoint`` compares them) or those of an
  epoch to keep, the file gets a second name: ``best.ckpt``, ``epoch-0002.ckpt``. Nodes that do not
  see the directory get a copy of each.
- **Repair.** A process may be killed between two of these. The next one finds in ``last.ckpt``
  which links there should be, and makes those that are missing.
"""

import logging
import math
import re
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import (
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    Timer,
)
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from torch import Tensor

from samestep.errors import ConfigError
from samestep.ranks import lightning_patches, stopping
from samestep.ranks.stopping import Stopped
from samestep.run import nodes, record, seal
from samestep.run.checkpoint import AtomicCheckpointIO, Trial, link_checkpoint
from samestep.run.seal import Seal, verify

log = logging.getLogger(__name__)

Settings = dict[str, Any]


class StopBetweenSteps(L.Callback):
    """Stops all ranks before the next step when one of them got a signal.

    It is the first callback, so that no other one has begun a step that is not taken. Validation
    runs to its end: the checkpoint then holds all of it.

    Args:
        last: saves now and then within an epoch, and when the run stops; None saves nothing.
    """

    def __init__(self, last: "LastCheckpoint | None") -> None:
        self.last = last
        # Whether no gradients are accumulated, so that the ranks ask each other before the next
        # batch. A wait for this batch may be interrupted then, and only then.
        self._asks_before_batch = True
        self._is_first_batch = True  # of this process

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Defer signals from here on, and begin where the checkpoint was saved."""
        # The first callback does it: the others ask for the epoch.
        lightning_patches.continue_as_undisturbed(trainer)
        stopping.defer()
        self._is_first_batch = True
        # A checkpoint is saved between two optimizer steps, so a run continues between two too.
        self._set_asking(True)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Allow a stop: an optimizer step never reaches from one epoch into the next."""
        self._set_asking(True)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Save or stop, if any rank wishes to; within an optimizer step do nothing."""
        if self._is_first_batch:
            self._is_first_batch = False
            # Lightning calls `on_train_epoch_start` of no callback when it continues an epoch.
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, GradientAccumulationScheduler):
                    callback.on_train_epoch_start(trainer)
        if not self._asks_before_batch:
            return
        if self.last is None:
            stopping.check()
        else:
            self.last.between_steps(trainer)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Find out whether the next batch begins an optimizer step."""
        self._set_asking((batch_idx + 1) % trainer.accumulate_grad_batches == 0)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let validation run to its end."""
        stopping.allow_interruption(False)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let a wait for training data be interrupted as before."""
        stopping.allow_interruption(self._asks_before_batch)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let a wait for test data be interrupted."""
        stopping.allow_interruption(True)

    def on_test_batch_start(self, *args: Any) -> None:
        """Stop if any rank was told to; the next attempt tests again."""
        stopping.check()

    def _set_asking(self, asks: bool) -> None:
        self._asks_before_batch = asks
        stopping.allow_interruption(asks)


class LastCheckpoint(Checkpoint):
    """Saves ``last.ckpt``, from which the same command continues as if nothing had happened.

    Saves at the end of each epoch, after a validation that was the best one, every ``every_s``
    seconds, and when told to stop by a signal; then all ranks stop together. Within an epoch it
    acts only where ``between_steps`` is called: before the first batch of an optimizer step.

    Args:
        dirpath: directory of the checkpoints.
        every_s: seconds after which an interrupted epoch has been saved.
        every_n_epochs: epochs between two checkpoints that are kept, such as ``epoch-0002.ckpt``;
            epochs are counted from 1. None keeps none.
    """

    def __init__(self, dirpath: str, every_s: float, every_n_epochs: int | None = None) -> None:
        self.path = Path(dirpath) / "last.ckpt"
        self.every_s = every_s
        self.every_n_epochs = every_n_epochs
        self.best: BestCheckpoint | None = None
        """Knows when the weights are the best ones; whoever builds the run sets it."""
        self._kept = 0, 0  # epoch and step of the newest checkpoint of an epoch to keep
        self._saved_at = time.monotonic()
        self._saved_step = 0
        self._has_ended = False
        self._accumulated = 0  # batches of an optimizer step, by the configuration
        self._resumed_accumulated = 0  # by that checkpoint, if a callback had changed it
        self._metrics: dict[str, Tensor] = {}  # of the checkpoint from which the run continues

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Tell the reader of checkpoints which shapes to expect."""
        checkpoint_io = trainer.strategy.checkpoint_io
        if stage == "fit" and isinstance(checkpoint_io, AtomicCheckpointIO):
            weights = pl_module.state_dict() if pl_module.strict_loading else {}
            checkpoint_io.shapes = {
                name: value.shape for name, value in weights.items() if isinstance(value, Tensor)
            }

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End at once if early stopping had ended this run before."""
        self._saved_at, self._saved_step = time.monotonic(), trainer.global_step
        trainer.should_stop = trainer.should_stop or self._has_ended
        if trainer.ckpt_path is None:
            self._try(trainer)
        # GradientAccumulationScheduler sets it only where an epoch begins.
        self._accumulated = trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches = self._resumed_accumulated or self._accumulated
        # Not every epoch logs each metric anew, but early stopping or a plateau schedule may ask
        # for it at the end of each.
        trainer.callback_metrics.update(self._metrics)

    def between_steps(self, trainer: L.Trainer) -> None:
        """Save or stop if any rank wishes to; every rank calls this before each step."""
        # Without a new step there is nothing to save. Before the first step of an epoch, a loader
        # with a state of its own has begun, and Lightning's progress has not.
        due = trainer.is_global_zero and trainer.global_step > self._saved_step and self._is_due()
        signum, must_save = stopping.agreed(save=due and trainer.training)
        if signum:
            raise Stopped(signum)
        if must_save:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save, after early stopping has had its turn."""
        if self.best:
            self.best.update(trainer)
        epoch = trainer.current_epoch + 1
        if self.every_n_epochs and epoch % self.every_n_epochs == 0:
            self._kept = epoch, trainer.global_step
        lightning_patches.step_plateau_schedules(trainer)
        self._save(trainer)
        # All ranks wait, whether the epoch was the best one or not: the test that comes after the
        # last epoch looks for best.ckpt on each of them.
        trainer.strategy.barrier()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Save when all ranks have agreed to stop.

        Any other exception may be on one rank only, and saving needs all of them.
        """
        if not isinstance(exception, Stopped):
            return
        if trainer.training and trainer.global_step > self._saved_step:
            self._save(trainer)
        if trainer.is_global_zero:
            print(f"Stopped by {exception.name} after step {trainer.global_step}; saved.")

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep whether early stopping has ended the run, which Lightning forgets."""
        # A run that is out of time goes on with a larger trainer.max_time.
        checkpoint["has_ended"] = trainer.should_stop and not is_out_of_time(trainer)
        checkpoint["ended_by"] = {
            callback.state_key: settings_of(callback)
            for callback in early_stoppings(trainer)
            if callback.stopping_reason is not EarlyStoppingReason.NOT_STOPPED
        }
        if trainer.accumulate_grad_batches != self._accumulated:
            checkpoint["accumulate_grad_batches"] = trainer.accumulate_grad_batches
        metrics = trainer.callback_metrics
        checkpoint["kept"] = self._kept
        checkpoint["metrics"] = {name: value.cpu().clone() for name, value in metrics.items()}

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember it, unless the new configuration lets the run go on.

        If the checkpoint should have been kept under another name, and was not, do it now.
        """
        now = {callback.state_key: settings_of(callback) for callback in early_stoppings(trainer)}
        ended_by: dict[str, Settings] = checkpoint.get("ended_by", {})
        is_longer = any(lets_go_on(old, now.get(key)) for key, old in ended_by.items())
        self._has_ended = checkpoint.get("has_ended", False) and not is_longer
        self._resumed_accumulated = checkpoint.get("accumulate_grad_batches", 0)
        self._metrics = checkpoint.get("metrics", {})
        self._kept = epoch, step = checkpoint.get("kept", (0, 0))
        target = self._path_of(epoch)
        is_due = trainer.state.fn == "fit" and epoch and checkpoint["global_step"] == step
        if is_due and trainer.is_global_zero and not target.exists():
            link_checkpoint(Path(str(trainer.ckpt_path)), target)

    def _try(self, trainer: L.Trainer) -> None:
        """Make a checkpoint before the first step, to find now what could not be saved or read.

        Raises:
            ConfigError: on all ranks, naming what the model, a callback or the data would save.
        """
        checkpoint_io = trainer.strategy.checkpoint_io
        if trainer.fast_dev_run or not isinstance(checkpoint_io, AtomicCheckpointIO):  # type: ignore[attr-defined]
            return
        checkpoint_io.trial = Trial()
        # Should the strategy write files itself, this name is not taken for a checkpoint.
        trainer.save_checkpoint(self.path.with_name(".trial.ckpt"))
        trial = trainer.strategy.broadcast(checkpoint_io.trial)
        checkpoint_io.trial = None
        if not trial.was_called:
            raise ConfigError(
                f"trainer.strategy: {type(trainer.strategy).__name__} writes checkpoints of its "
                "own kind, which cannot be verified; a run needs one file with all weights",
                on_all_ranks=True,
            )
        if trial.problem:
            raise ConfigError(trial.problem, on_all_ranks=True)
        if trial.left_out and trainer.is_global_zero:
            names = ", ".join(trial.left_out)
            ignored = ", ".join(repr(name.split()[0]) for name in trial.left_out)
            print(
                f"Note: checkpoints leave out these hyperparameters, which could not be read "
                f"again: {names}. load_from_checkpoint needs them as arguments. To leave them out "
                f"yourself: self.save_hyperparameters(ignore=[{ignored}])",
                flush=True,
            )

    def _is_due(self) -> bool:
        is_late = time.monotonic() - self._saved_at > self.every_s
        return is_late or (self.best is not None and self.best.has_improved)

    def _save(self, trainer: L.Trainer) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        with lightning_patches.between_steps(trainer):
            trainer.save_checkpoint(self.path)
        self._saved_at, self._saved_step = time.monotonic(), trainer.global_step
        saved = [self.path, *self._link(trainer)]
        nodes.share(self.path.parent.parent, [f"checkpoints/{path.name}" for path in saved])

    def _link(self, trainer: L.Trainer) -> list[Path]:
        """Give the file that was just saved the other names that it should have, on rank zero."""
        names = []
        if self.best and self.best.has_improved:
            self.best.has_improved = False
            names.append(self.best.path)
        if self._kept[0] == trainer.current_epoch + 1:
            names.append(self._path_of(self._kept[0]))
        for path in names if trainer.is_global_zero else []:
            link_checkpoint(self.path, path)
        return names

    def _path_of(self, epoch: int) -> Path:
        return self.path.with_name(f"epoch-{epoch:04}.ckpt")


class BestCheckpoint(Checkpoint):
    """Keeps the weights with the best monitored metric as ``best.ckpt``, and has them tested.

    Each validation is compared with the best one so far, and each epoch's end too. If the metric
    has improved, ``LastCheckpoint`` saves ``last.ckpt`` before the next step, and ``best.ckpt``
    becomes a hard link to it. So ``best.ckpt`` holds exactly the weights that were validated. A
    process that is killed in between does the rest when it continues. Rank zero decides and links
    alone, so ranks with other values cannot wait for each other. A value that is not a number is no
    improvement.

    Args:
        dirpath: directory of the checkpoints.
        monitor: a metric that the model logs, such as ``val/loss``. None: the weights of the last
            epoch are the best ones.
        mode: ``min`` or ``max``.
    """

    def __init__(self, dirpath: str, monitor: str | None, mode: str) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode}: must be min or max")
        self.path = Path(dirpath) / "best.ckpt"
        self.monitor = monitor
        self.mode = mode
        self.score: float | None = None
        self.step: int | None = None
        """Optimizer steps of the best checkpoint; None: nothing had a score yet."""
        self.epoch: int | None = None
        """Its epoch, counted from 1."""
        self.has_improved = False
        """Whether the weights of now are the best ones, and not yet kept."""
        self._has_validated = False

    @property
    def state_key(self) -> str:
        """The name of the state in a checkpoint: that of a subclass is found too."""
        return "BestCheckpoint"

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse validations within an optimizer step: no checkpoint is saved there.

        Say so if no validation will come at all.
        """
        if trainer.is_global_zero and (why := why_last_is_tested(trainer, self.monitor)):
            print(f"Note: {why}, so the last weights are tested, not the best ones", flush=True)
        interval, num_batches = trainer.val_check_batch, trainer.num_training_batches
        if interval is None or interval >= num_batches:
            return  # validation comes at the end of an epoch
        if interval % trainer.accumulate_grad_batches:
            raise ConfigError(
                f"trainer.val_check_interval: a validation after {interval} batches comes "
                f"within an optimizer step of {trainer.accumulate_grad_batches} batches "
                "(trainer.accumulate_grad_batches); choose a multiple of it",
                on_all_ranks=True,
            )

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compare the weights that were validated with the best ones."""
        if trainer.sanity_checking:
            return
        self._has_validated = True
        self._compare(trainer)

    def update(self, trainer: L.Trainer) -> None:
        """Compare again at the end of an epoch: the metric may be one of training.

        Raises:
            ConfigError: if the run logs no such metric.
        """
        self._compare(trainer)
        if self.monitor is None:
            self.has_improved, self.step = True, trainer.global_step
        elif self._has_validated and self.monitor not in trainer.callback_metrics:
            names = ", ".join(sorted(trainer.callback_metrics)) or "no metric at all"
            message = f"callbacks.best.monitor={self.monitor}: the run logs {names}"
            raise ConfigError(message, on_all_ranks=True)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Let each checkpoint say which one is the best."""
        checkpoint["best_step"] = self.step

    def state_dict(self) -> dict[str, Any]:
        """The best score, its step and its epoch."""
        known = {"score": self.score, "step": self.step, "epoch": self.epoch}
        return {"monitor": self.monitor, **known}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        if state_dict["monitor"] == self.monitor:
            self.score, self.step = state_dict["score"], state_dict["step"]
            self.epoch = state_dict["epoch"]

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Of a run that continues: repair ``best.ckpt``."""
        if trainer.state.fn == "test":
            # A callback that averages weights has just put those of training into the model.
            trainer.strategy.load_model_state_dict(checkpoint, strict=pl_module.strict_loading)
        elif trainer.state.fn == "fit" and trainer.is_global_zero:
            self._repair(trainer, checkpoint)

    def _repair(self, trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
        """Compare ``best.ckpt`` with the state of a run that continues."""
        state = checkpoint["callbacks"].get(self.state_key)
        if not state or state["step"] is None:
            return
        found = verify(self.path, record.read(self.path.parent.parent))
        if isinstance(found, Seal) and found.global_step == state["step"]:
            return
        # The process was killed after it had saved last.ckpt and before it linked best.ckpt; or
        # somebody has removed best.ckpt, and its weights are kept as epoch-0002.ckpt too.
        if self._link_again(state["step"]):
            return
        why = found if isinstance(found, str) else f"it is of step {found.global_step}"
        log.warning(
            "%s is not the checkpoint of step %s, which was the best one: %s. The best one from "
            "here on takes its place.", self.path, state["step"], why,
        )  # fmt: skip
        state.update(score=None, step=None, epoch=None)

    def _compare(self, trainer: L.Trainer) -> None:
        """Note whether the weights of now have a better value than the best ones."""
        value = float(trainer.callback_metrics.get(self.monitor or "", math.nan))
        if math.isnan(value):
            return
        if self.score is not None:
            better = value > self.score if self.mode == "max" else value < self.score
            if not better:
                return
        self.has_improved = True
        self.score, self.step = value, trainer.global_step
        self.epoch = trainer.current_epoch + 1

    def _link_again(self, step: int) -> bool:
        """Link ``best.ckpt`` to another checkpoint of this step; return whether there is one."""
        for source in sorted(self.path.parent.glob("[!.]*.ckpt")):
            own = seal.read(source)
            if source == self.path or own is None or own.global_step != step:
                continue
            if isinstance(verify(source, record.read(source.parent.parent)), Seal):
                link_checkpoint(source, self.path)
                return True
        return False


def why_last_is_tested(trainer: L.Trainer, monitor: str | None) -> str | None:
    """Why no weights will be known to be the best ones, as a clause; None if some may be."""
    if monitor is None:
        return "callbacks.best.monitor=null chooses no metric"
    if re.search("val", monitor, re.IGNORECASE) and never_validates(trainer):
        return f"this run never validates, and nothing logs {monitor}"
    return None


def never_validates(trainer: L.Trainer) -> bool:
    """Whether a run has no validation data, or ends before its first validation."""
    every_n, max_epochs = trainer.check_val_every_n_epoch, trainer.max_epochs
    ends_before = every_n is not None and max_epochs is not None and 0 < max_epochs < every_n
    has_no_batches = trainer.val_dataloaders is not None and not sum(trainer.num_val_batches)
    return ends_before or has_no_batches or not trainer.enable_validation


def early_stoppings(trainer: L.Trainer) -> list[EarlyStopping]:
    """The callbacks of the run that may end it early."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, EarlyStopping)]


def settings_of(stopping: EarlyStopping) -> Settings:
    """What decides when it ends the run; the metric is part of its state's key."""
    names = ("patience", "min_delta", "check_finite", "stopping_threshold", "divergence_threshold")
    return {name: getattr(stopping, name) for name in names}


def lets_go_on(old: Settings, new: Settings | None) -> bool:
    """Whether a run that ended by the old settings of early stopping goes on with the new ones.

    With less patience it would have ended earlier.
    """
    if new is None or new["patience"] > old["patience"]:
        return True
    return new | {"patience": None} != old | {"patience": None}


def is_out_of_time(trainer: L.Trainer) -> bool:
    """Whether ``trainer.max_time`` is over."""
    timers = [c for c in trainer.callbacks if isinstance(c, Timer)]  # type: ignore[attr-defined]
    left = [timer.time_remaining() for timer in timers]
    return any(seconds is not None and seconds <= 0 for seconds in left)
