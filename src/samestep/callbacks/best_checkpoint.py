"""The best checkpoint: the ``last.ckpt`` of the best epoch, under a second name."""

import logging
import math
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from samestep.errors import ConfigError
from samestep.run import sidecar
from samestep.run.checkpoint import link_checkpoint, verify
from samestep.run.files import sha256_of
from samestep.run.identity import read_identity
from samestep.run.sidecar import Version

log = logging.getLogger(__name__)


class BestCheckpoint(Checkpoint):
    """Keeps the checkpoint of the epoch with the best monitored metric as ``best.ckpt``.

    ``LastCheckpoint`` calls it at the end of each epoch: ``update`` before it saves ``last.ckpt``,
    so that the score is in there, and ``link`` after. If the metric has improved, ``best.ckpt``
    becomes a hard link to ``last.ckpt``. A process that is killed in between does the rest when it
    continues. Rank zero decides and links alone, so ranks with other values cannot wait for each
    other. A value that is not a number is no improvement.

    Args:
        dirpath: directory of the checkpoints.
        monitor: a metric that the model logs, such as ``val/loss``.
        mode: ``min`` or ``max``.
    """

    def __init__(self, dirpath: str, monitor: str, mode: str) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode}: must be min or max")
        self.path = Path(dirpath) / "best.ckpt"
        self.monitor = monitor
        self.mode = mode
        self.score: float | None = None
        self.step: int | None = None
        """Optimizer steps of the best checkpoint; None: no epoch had a score yet."""
        self._has_improved = False
        self._has_validated = False

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remember that the metrics of a validation are known."""
        self._has_validated = self._has_validated or not trainer.sanity_checking

    def update(self, trainer: L.Trainer) -> None:
        """Compare the epoch that has ended with the best one.

        Raises:
            ConfigError: if the run logs no such metric.
        """
        self._has_improved = False
        value = trainer.callback_metrics.get(self.monitor)
        if value is not None:
            self._compare(float(value), trainer.global_step)
        elif self._has_validated:
            names = ", ".join(sorted(trainer.callback_metrics)) or "no metric at all"
            error = ConfigError(f"callbacks.best.monitor={self.monitor}: the run logs {names}")
            error.on_all_ranks = True
            raise error

    def link(self, trainer: L.Trainer, last: Path) -> None:
        """Keep ``last``, which was just saved, if its epoch is the best one."""
        if not self._has_improved or not trainer.is_global_zero:
            return
        # A strategy that writes its checkpoints itself leaves no sidecar.
        versions = sidecar.read(last) or [Version(sha256_of(last), last.name)]
        link_checkpoint(last, self.path, versions[0]._replace(score=self.score))

    def state_dict(self) -> dict[str, Any]:
        """The best score and its step."""
        return {"monitor": self.monitor, "score": self.score, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        if state_dict["monitor"] == self.monitor:
            self.score, self.step = state_dict["score"], state_dict["step"]

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Compare ``best.ckpt`` with the state of a run that continues, and repair it."""
        state = checkpoint["callbacks"].get(self.state_key)
        begins_to_fit = trainer.state.fn == "fit" and trainer.is_global_zero
        if not begins_to_fit or not state or state["step"] is None:
            return
        found = verify(self.path, read_identity(self.path.parent.parent))
        if isinstance(found, Version) and found.global_step == state["step"]:
            return
        if checkpoint["global_step"] == state["step"]:
            # The process was killed after it had saved last.ckpt and before it linked best.ckpt.
            self._link_again(Path(str(trainer.ckpt_path)), state["score"])
            return
        why = found if isinstance(found, str) else f"it is of step {found.global_step}"
        log.warning(
            "%s is not the checkpoint of step %s, which was the best one: %s. The best epoch from "
            "here on takes its place.", self.path, state["step"], why,
        )  # fmt: skip
        state.update(score=None, step=None)

    def _compare(self, value: float, step: int) -> None:
        if math.isnan(value):
            return
        if self.score is not None:
            better = value > self.score if self.mode == "max" else value < self.score
            if not better:
                return
        self._has_improved = True
        self.score, self.step = value, step

    def _link_again(self, source: Path, score: float) -> None:
        found = verify(source, read_identity(source.parent.parent))
        if isinstance(found, Version) and source != self.path:
            link_checkpoint(source, self.path, found._replace(score=score))
