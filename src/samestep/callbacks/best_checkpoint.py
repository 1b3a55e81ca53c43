"""The best checkpoint: the ``last.ckpt`` of the best weights, under a second name."""

import logging
import math
import re
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from samestep.errors import ConfigError
from samestep.run import seal
from samestep.run.checkpoint import link_checkpoint
from samestep.run.identity import read_identity
from samestep.run.seal import Seal, verify

log = logging.getLogger(__name__)


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

    def link(self, trainer: L.Trainer, last: Path) -> list[Path]:
        """Keep ``last``, which was just saved, if its weights are the best ones."""
        has_improved, self.has_improved = self.has_improved, False
        if not has_improved or not trainer.is_global_zero:
            return []
        link_checkpoint(last, self.path)
        return [self.path]

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
            self.epoch = state_dict.get("epoch")  # checkpoints of older versions lack it

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
        found = verify(self.path, read_identity(self.path.parent.parent))
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
            if isinstance(verify(source, read_identity(source.parent.parent)), Seal):
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
