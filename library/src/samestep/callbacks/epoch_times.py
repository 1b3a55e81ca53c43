"""How long each epoch takes, and its learning rate."""

import time
from typing import Any

import lightning as L


class EpochTimes(L.Callback):
    """Logs two values once per epoch, on rank zero.

    - ``time/epoch_s``: seconds of training and validation, data loading included. An epoch that was
      interrupted counts what its checkpoint knows of, without the time between the starts.
    - ``lr``: learning rate of the first parameter group at the end of the epoch.
    """

    def __init__(self) -> None:
        self._before = 0.0  # seconds of this epoch before the run was interrupted
        self._start = time.perf_counter()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log both, and start the clock of the next epoch."""
        seconds = self._seconds()
        self._before, self._start = 0.0, time.perf_counter()
        if not trainer.is_global_zero:
            return
        values = {"time/epoch_s": seconds}
        if trainer.optimizers:
            values["lr"] = float(trainer.optimizers[0].param_groups[0]["lr"])
        # With rank_zero_only, sync_dist reduces nothing: it only keeps Lightning from warning.
        pl_module.log_dict(values, rank_zero_only=True, sync_dist=True)

    def state_dict(self) -> dict[str, Any]:
        """How long the interrupted epoch has taken so far."""
        return {"seconds": self._seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._before = float(state_dict["seconds"])

    def _seconds(self) -> float:
        return self._before + time.perf_counter() - self._start
