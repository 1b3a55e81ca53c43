from collections.abc import Mapping
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

from samestep.callbacks.step_log import StepLog
from tests.samestep.callbacks.tiny import Tiny


class Halved(Tiny):
    """Each step has half the learning rate of the step before."""

    def __init__(self, lr: float | torch.Tensor) -> None:
        super().__init__()
        self.lr = lr

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        schedule = ExponentialLR(optimizer, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Recorder(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rates: dict[int | None, float] = {}

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if "step/lr" in metrics:
            self.rates[step] = metrics["step/lr"]


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_the_rate_is_the_one_with_which_the_step_was_taken(
    lr: float | torch.Tensor, tmp_path: Path
):
    recorder = Recorder()
    trainer = L.Trainer(
        accelerator="cpu", max_steps=3, log_every_n_steps=1, logger=recorder,
        callbacks=[StepLog()], default_root_dir=tmp_path, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    batches = DataLoader(torch.ones(8, 2), batch_size=2)
    trainer.fit(Halved(lr), batches, batches)
    assert recorder.rates == {0: 0.5, 1: 0.25, 2: 0.125}
