"""When the last checkpoint is written: each epoch, every so often, and when told to stop."""

import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from torch import Tensor

from samestep.callbacks.best_checkpoint import BestCheckpoint
from samestep.callbacks.epoch_checkpoints import EpochCheckpoints
from samestep.errors import ConfigError
from samestep.ranks import lightning_patches, stopping
from samestep.ranks.stopping import Stopped
from samestep.run.checkpoint import AtomicCheckpointIO, Trial

Settings = dict[str, Any]


class LastCheckpoint(Checkpoint):
    """Saves ``last.ckpt``, from which the same command continues as if nothing had happened.

    Saves at the end of each epoch, after a validation that was the best one, every ``every_s``
    seconds, and when told to stop by a signal; then all ranks stop together. Within an epoch it
    acts only where ``between_steps`` is called: before the first batch of an optimizer step.

    Args:
        dirpath: directory of the checkpoints.
        every_s: seconds after which an interrupted epoch has been saved.
    """

    def __init__(self, dirpath: str, every_s: float) -> None:
        self.path = Path(dirpath) / "last.ckpt"
        self.every_s = every_s
        self.best: BestCheckpoint | None = None
        """Keeps the best of the saved checkpoints; ``samestep.build`` sets it."""
        self.epochs: EpochCheckpoints | None = None
        """Keeps those of some epochs; ``samestep.build`` sets it too."""
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
        for keeper in self._keepers():
            keeper.update(trainer)
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
        checkpoint["metrics"] = {name: value.cpu().clone() for name, value in metrics.items()}

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember it, unless the new configuration lets the run go on."""
        now = {callback.state_key: settings_of(callback) for callback in early_stoppings(trainer)}
        ended_by: dict[str, Settings] = checkpoint.get("ended_by", {})
        is_longer = any(lets_go_on(old, now.get(key)) for key, old in ended_by.items())
        self._has_ended = checkpoint.get("has_ended", False) and not is_longer
        self._resumed_accumulated = checkpoint.get("accumulate_grad_batches", 0)
        self._metrics = checkpoint.get("metrics", {})

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
        for keeper in self._keepers():
            keeper.link(trainer, self.path)

    def _keepers(self) -> list[BestCheckpoint | EpochCheckpoints]:
        """Those that keep some of the saved checkpoints under a second name."""
        return [keeper for keeper in (self.best, self.epochs) if keeper]


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
