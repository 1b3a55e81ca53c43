"""Figures of a test that Lightning returns in parts, or not at all."""

from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader

from samestep.hydra.saved_run import evaluate


class TwoSets(L.LightningModule):
    """Logs of two loaders, with noise, and once at the end; shows what it does to a tracker."""

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("mean", batch.mean() + torch.rand(1))
        if dataloader_idx == 0:
            self.log("shown", 1.0, logger=False, prog_bar=True, add_dataloader_idx=False)
        self.logger.experiment.add_scalar("mean", batch.mean(), batch_idx)

    def on_test_epoch_end(self):
        self.log("end", 1.0)

    def test_dataloader(self):
        return [DataLoader(torch.full((4, 1), value), batch_size=2) for value in (10.0, 20.0)]


def test_figures_of_all_loaders_are_there_and_repeat(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("seed: 1\ntrainer: {precision: 32-true}\n")
    figures = [evaluate(TwoSets(), None, tmp_path, "test", "cpu") for _ in range(2)]
    assert figures[0] == figures[1]
    first, second = "mean/dataloader_idx_0", "mean/dataloader_idx_1"
    assert set(figures[0]) == {first, second, "shown", "end"}
    # Each loader has noise of its own.
    assert 9 < figures[0][second] - figures[0][first] < 11
    assert figures[0][second] - figures[0][first] != 10
    (tmp_path / "config.yaml").write_text("seed: 2\ntrainer: {precision: 32-true}\n")
    assert evaluate(TwoSets(), None, tmp_path, "test", "cpu") != figures[0]
