"""Metrics of a module that draws random numbers: again after a stop, and by ``samestep evaluate``.

On two ranks: library/tests/test_logged_metrics.py.
"""

import csv
import json
import random
import signal
from collections.abc import Callable
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor

from library.tests.test_logged_metrics import Data, Plain
from tests.conftest import final_metrics, run

pytestmark = pytest.mark.program


def command(model: type[L.LightningModule], root: Path, *overrides: str) -> list[str]:
    return [
        "train.py", "data=skeleton", f"data._target_={Data.__module__}.Data",
        "data.global_batch_size=20", "model=skeleton",
        f"model._target_={__name__}.{model.__name__}", "callbacks.checkpoints.monitor=val_loss",
        "callbacks.checkpoints.mode=min", "trainer.max_epochs=2", "trainer.accelerator=cpu",
        "report=false", f"run_root={root}", *overrides,
    ]  # fmt: skip


Evaluate = Callable[..., dict[str, float]]


@pytest.fixture
def evaluated(capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """The metrics that ``samestep evaluate`` prints for a run."""
    # The processes that train import this file, and find no scripts.
    from samestep.evaluate import main

    def evaluate(run_dir: Path, *words: str) -> dict[str, float]:
        capsys.readouterr()
        assert main([str(run_dir), "--format", "json", "--trust", *words]) == 0
        return json.loads(capsys.readouterr().out)

    return evaluate


class Noisy(Plain):
    """Draws random numbers in every step, and shows images, as a VAE or a GAN does."""

    def losses(self, batch: list[Tensor]) -> Tensor:
        noise = torch.randn(1) + random.random() + np.random.rand()
        return super().losses(batch) * (1 + noise.square())

    def training_step(self, batch, batch_idx):
        tracker = self.logger.experiment
        tracker.add_image("samples", torch.zeros(1, 2, 2), self.global_step)
        if type(self.logger).__name__ == "NullLogger":
            with tracker.train() as stage:
                stage.config["lr"] = stage.config.update({"lr": 1}, allow_val_change=True)
            assert not list(tracker.images)
            self.logger.log_image(key="samples", images=[])
            tracker.log({"x": 1})
        assert Path(self.logger.log_dir).is_dir()
        assert self.trainer.log_dir == self.logger.log_dir
        assert len(self.loggers) == 2
        return super().training_step(batch, batch_idx)

    def on_test_epoch_start(self):
        self.start = torch.rand(1)

    def on_test_epoch_end(self):
        self.log("test_drawn", self.start + torch.rand(1))


def test_random_metrics_are_repeated_by_evaluate_and_after_an_interruption(
    tmp_path: Path, evaluated: Evaluate
):
    """On the way, a module has the chosen tracker, or one that does nothing."""
    metrics, rows = [], []
    for name, *overrides in (["whole", "logger=tensorboard"], ["stopped"]):
        watch = "+callbacks.signaller"
        words = [
            *command(Noisy, tmp_path, *overrides),
            f"{watch}._target_=tests.signaller.Quiet", f"{watch}.dirpath={tmp_path / 'seen'}",
        ]  # fmt: skip
        faults = [(f"4 {signal.SIGTERM:d} 0 rank", 143)] if name == "stopped" else []
        for fault, code in [*faults, ("-1 0 0 rank", 0)]:
            result = run(*words, RUN_ID=name, SIGNAL_AT=fault)
            assert result.returncode == code, result.stderr
        metrics.append(final_metrics(tmp_path / name))
        with (tmp_path / name / "metrics.csv").open() as file:
            rows.append(
                [{k: v for k, v in row.items() if "_per_" not in k} for row in csv.DictReader(file)]
            )
    assert metrics[0] == metrics[1]
    assert [row["step"] for row in rows[0]] == ["2", "5", "6"]
    for split, ckpt in (("test", "best"), ("val", "last")):
        again = evaluated(tmp_path / "whole", "--split", split, "--ckpt", ckpt)
        # What is logged with logger=False is in no record of validation.
        again = {name: value for name, value in again.items() if name != "val/acc"}
        assert again == {name: value for name, value in metrics[0].items() if name in again}
