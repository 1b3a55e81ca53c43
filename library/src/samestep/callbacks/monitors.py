"""Monitors that validation never logs, found before the first step."""

import re
from collections.abc import Mapping
from difflib import get_close_matches

import lightning as L

from samestep.errors import ConfigError


class Monitors(L.Callback):
    """Compares each monitor with what one batch of validation logs, before training begins.

    A model that says its ``metric_names`` needs no such batch: ``samestep.hydra.build`` compares
    those. Lightning leaves the batch out if a run continues. Only monitors with ``val`` in their
    name, or that begin with ``test``, are compared, because others may be logged by training.

    Args:
        monitors: by the key that sets it, such as ``callbacks.checkpoints.monitor``.
    """

    def __init__(self, monitors: Mapping[str, str]) -> None:
        self.monitors = dict(monitors)

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compare."""
        logged = sorted(trainer.callback_metrics)
        if not logged:
            return  # some models log nothing in this first validation
        schedules = {
            f"the schedule {type(config.scheduler).__name__}, monitor": str(config.monitor)
            for config in trainer.lr_scheduler_configs
            if config.reduce_on_plateau
        }
        wrong = {
            key: name
            for key, name in {**self.monitors, **schedules}.items()
            if name not in logged and re.search("val|^test", name, re.IGNORECASE)
        }
        if wrong:
            key, name = next(iter(wrong.items()))
            losses = [name for name in logged if "loss" in name.lower()]
            near = (get_close_matches(name, logged, cutoff=0.8) or losses or logged)[0]
            remedy = f"{key}={near}"
            if near in losses and key.endswith("monitor"):
                remedy += f" {key.removesuffix('monitor')}mode=min"
            raise ConfigError(
                f"{', '.join(f'{k}={n}' for k, n in wrong.items())}: validation logs "
                f"{', '.join(logged)}; choose one of these, such as {remedy}. "
                "callbacks.checkpoints.monitor=null tests the last weights. If the metric is "
                "logged later only, add trainer.num_sanity_val_steps=0"
            )
