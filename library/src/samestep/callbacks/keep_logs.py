"""The means of an unfinished epoch, in a checkpoint."""

import logging
from typing import Any

import lightning as L
from torchmetrics import Metric, MetricCollection

from samestep.ranks import lightning_patches
from samestep.ranks.process_group import gather

log = logging.getLogger(__name__)


class KeepLogs(L.Callback):
    """Saves what ``self.log`` and torchmetrics have summed up within an epoch, on each rank.

    So ``self.log(..., on_epoch=True)`` of a training step, and a metric that it updates, cover the
    whole epoch, also if it was interrupted.
    """

    def __init__(self) -> None:
        self._saved: list[dict[str, Any]] = []  # of each rank, from a checkpoint

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the sums of all ranks; at the end of an epoch there are none to continue."""
        epochs = trainer.fit_loop.epoch_progress.current
        if epochs.processed > epochs.completed:  # type: ignore[attr-defined]
            return
        own = {
            "logs": lightning_patches.logs_of_epoch(trainer),
            "metrics": {
                name: lightning_patches.state_of_metric(metric)
                for name, metric in metrics_of(pl_module).items()
                if metric.update_called
            },
        }
        checkpoint["logs_of_ranks"] = gather(own)

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember them until the model is on its device."""
        if trainer.state.fn == "fit":
            self._saved = checkpoint.get("logs_of_ranks", [])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give each rank its own sums, or rank zero all of them if the number has changed."""
        saved, self._saved = self._saved, []
        if len(saved) == trainer.world_size:
            saved = [saved[trainer.global_rank]]
        elif not saved or not trainer.is_global_zero:
            return
        lightning_patches.continue_logs(trainer, [own["logs"] for own in saved])
        for name, metric in metrics_of(pl_module).items():
            states = [own["metrics"][name] for own in saved if name in own["metrics"]]
            try:
                lightning_patches.continue_metric(metric, states)
            except RuntimeError as error:
                metric.reset()
                log.warning("%s counts the rest of this epoch only: %s", name, error)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Add what was saved to what the batch before has logged."""
        lightning_patches.add_logs_before(trainer)


def metrics_of(module: L.LightningModule) -> dict[str, Metric]:
    """Every metric of torchmetrics within a module, by its name there."""
    for part in module.modules():
        if isinstance(part, MetricCollection):
            # Members with equal states update one of them only; reading them brings all up to date.
            list(part.items(keep_base=True, copy_state=False))
    return {name: part for name, part in module.named_modules() if isinstance(part, Metric)}
