"""A monitor that nothing logs is rejected before the first step."""

from pathlib import Path
from typing import Any

import pytest
import torch

from library.tests.kit import Scores, fit
from samestep.errors import ConfigError


class NoSteps(Scores):
    def training_step(self, batch, batch_idx):
        raise AssertionError("a step was taken")


class Losses(NoSteps):
    def __init__(self) -> None:
        super().__init__(1.0)

    def validation_step(self, batch, batch_idx):
        self.log_dict({"val_mae": 1.0, "val_loss": 1.0})


def plateau(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    config = {"scheduler": schedule, "monitor": "valid_loss"}
    return {"optimizer": optimizer, "lr_scheduler": config}


def test_a_wrong_monitor_is_found_before_the_first_step(tmp_path: Path):
    def of_a_schedule() -> Scores:
        model = NoSteps(1.0)
        model.configure = plateau
        return model

    for make, monitor, said in (
        (
            lambda: NoSteps(1.0),
            "val/accuracy",
            "^monitor=val/accuracy: validation logs val/score; choose one of these, and its mode. ",
        ),
        (Losses, "test_loss", "^monitor=test_loss: validation logs val_loss, val_mae; "),
        (of_a_schedule, None, "the schedule ReduceLROnPlateau, monitor=valid_loss: "),
    ):
        with pytest.raises(ConfigError, match=said):
            fit(tmp_path / "run", make, monitor=monitor, num_sanity_val_steps=1)
        assert not (tmp_path / "run").exists()


class KnowsSanityChecks(Scores):
    """Logs another metric in the sanity check."""

    def validation_step(self, batch, batch_idx):
        stage = "sanity" if self.trainer.sanity_checking else "val"
        self.log(f"{stage}/score", 1.0)


class NamesTheStage(Scores):
    """As pytorch-forecasting does."""

    def validation_step(self, batch, batch_idx):
        stage = self.trainer.state.stage.value
        self.log(f"{'val' if stage == 'validate' else stage}/score", 1.0)


@pytest.mark.parametrize("kind", [KnowsSanityChecks, NamesTheStage])
def test_metrics_of_the_sanity_check_are_no_candidates(tmp_path: Path, kind: type[Scores]):
    options: dict[str, Any] = {"num_sanity_val_steps": 1, "max_epochs": 1}

    def make() -> Scores:
        return kind(1.0)

    (part,) = fit(tmp_path / "right", make, monitor="val/score", **options)
    assert part.trainer.global_step == 4
    # A wrong one is found by the first validation of its own.
    with pytest.raises(ConfigError, match=r"^monitor=val/scores: the run logs .*val/score$"):
        fit(tmp_path / "wrong", make, monitor="val/scores", **options)


def test_a_monitor_of_training_is_not_rejected(tmp_path: Path):
    (part,) = fit(tmp_path, lambda: Scores(1.0), monitor="train_loss", num_sanity_val_steps=1)
    assert part.trainer.global_step == 8
