"""Learning-rate schedules of a run that becomes longer or shorter when it continues."""

from typing import Any

import lightning as L

# How far a schedule of torch has come. All else in its state describes its shape.
COUNTERS = (
    "last_epoch", "_step_count", "_last_lr",
    "best", "num_bad_epochs", "cooldown_counter",  # of ReduceLROnPlateau
)  # fmt: skip


class ScheduleLength(L.Callback):
    """Gives a run that continues with more steps the schedule of its new length.

    Torch saves the length of a schedule with its position. Lightning restores both, so that a
    one-cycle schedule would end with an error after its old number of steps. If the number of
    steps of the whole run has changed, only the position is restored here. The first step still
    takes the learning rate of the checkpoint; the new schedule sets that of the second one.
    """

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] = []
        self._num_steps: float | None = None

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the number of steps for which the schedules were made."""
        checkpoint["num_steps"] = float(trainer.estimated_stepping_batches)

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the states of the schedules from Lightning, until their new length is known."""
        if trainer.state.fn == "fit":
            self._num_steps = checkpoint.get("num_steps")
            self._states, checkpoint["lr_schedulers"] = checkpoint["lr_schedulers"], []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the schedules."""
        new_length = float(trainer.estimated_stepping_batches)
        is_same_length = self._num_steps in (None, new_length)
        for config, state in zip(trainer.lr_scheduler_configs, self._states, strict=False):
            schedule = config.scheduler
            if not is_same_length:
                state = with_position(schedule.state_dict(), state)
            schedule.load_state_dict(state)
        self._states = []


def with_position(fresh: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """The state ``fresh`` of a new schedule, moved to the position of a saved one."""
    state = fresh | {name: saved[name] for name in COUNTERS if name in saved}
    if "_schedulers" in fresh and "_schedulers" in saved:  # a schedule made of schedules
        pairs = zip(fresh["_schedulers"], saved["_schedulers"], strict=False)
        state["_schedulers"] = [with_position(new, old) for new, old in pairs]
    return state
