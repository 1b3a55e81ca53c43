"""Monitors that validation never logs, found before the first step."""

import re
from collections.abc import Mapping

import lightning as L

from samestep.errors import ConfigError


class Monitors(L.Callback):
    """Compares each monitor with what one batch of validation logs, before training begins.

    A model that says its ``metric_names`` needs no such batch: ``samestep.hydra.build`` compares
    those. Lightning leaves the batch out if a run continues. Only monitors with ``val`` in their
    name are compared, because others may be logged by training.

    Args:
        monitors: by the key that sets it, such as ``callbacks.checkpoints.monitor``.
    """

    def __init__(self, monitors: Mapping[str, str]) -> None:
        self.monitors = dict(monitors)

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compare.

        Raises:
            ConfigError: naming the monitors, and what was logged.
        """
        logged = sorted(trainer.callback_metrics)
        if not logged:
            return  # some models log nothing in this first validation
        schedules = {
            f"the schedule {type(config.scheduler).__name__}, monitor": str(config.monitor)
            for config in trainer.lr_scheduler_configs
            if config.reduce_on_plateau
        }
        wrong = [
            f"{key}={name}"
            for key, name in {**self.monitors, **schedules}.items()
            if name not in logged and re.search("val", name, re.IGNORECASE)
        ]
        if wrong:
            raise ConfigError(
                f"{', '.join(wrong)}: validation logs {', '.join(logged)}; choose one of these. "
                "callbacks.checkpoints.monitor=null tests the last weights. If the metric is "
                "logged later only, add trainer.num_sanity_val_steps=0",
                on_all_ranks=True,
            )
