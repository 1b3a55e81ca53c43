from pathlib import Path

import pytest
import torch

from library.tests.kit import Scores, batches, fit
from samestep import Trainer
from samestep.errors import ConfigError
from samestep.run.checkpoint import load


class NoSteps(Scores):
    def training_step(self, batch, batch_idx):
        raise AssertionError("a step was taken")


class Losses(NoSteps):
    def __init__(self) -> None:
        super().__init__(1.0)

    def validation_step(self, batch, batch_idx):
        self.log_dict({"val_mae": 1.0, "val_loss": 1.0})


def scores() -> Scores:
    return Scores(1.0)


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
            "^monitor=val/accuracy: validation logs val/score; .* such as monitor=val/score. ",
        ),
        (
            Losses,
            "val/accuracy",
            "such as monitor=val_loss mode=min. ",
        ),
        (Losses, "val_los", "such as monitor=val_loss mode=min. "),
        (Losses, "test_loss", "^monitor=test_loss: validation logs val_loss, val_mae; "),
        (of_a_schedule, None, "the schedule ReduceLROnPlateau, monitor=valid_loss: "),
    ):
        with pytest.raises(ConfigError, match=said):
            fit(tmp_path / "run", make, monitor=monitor, num_sanity_val_steps=1)
        assert not (tmp_path / "run").exists()


def test_a_monitor_of_training_is_not_rejected(tmp_path: Path):
    (part,) = fit(tmp_path, scores, monitor="train_loss", num_sanity_val_steps=1)
    assert part.trainer.global_step == 8


NOTE = "so the last weights are tested"


def test_without_a_monitor_the_last_weights_are_the_best(tmp_path: Path, capsys):
    for epochs in (1, 2):
        (part,) = fit(tmp_path, scores, max_epochs=epochs)
        assert isinstance(part.trainer, Trainer)
        assert NOTE not in capsys.readouterr().out  # the script has said so: monitor=None
    part.trainer.test(part.module, batches(shuffle=False), verbose=False)
    assert Path(part.trainer.ckpt_path).name == "last.ckpt"
    assert load(tmp_path / "checkpoints/last.ckpt")["global_step"] == 8


@pytest.mark.parametrize(
    ("options", "is_said"),
    [({"limit_val_batches": 0}, True), ({"check_val_every_n_epoch": 4}, True),
     ({"check_val_every_n_epoch": 2}, False)],
)  # fmt: skip
def test_a_run_that_never_validates_says_so(tmp_path: Path, capsys, options, is_said: bool):
    fit(tmp_path, scores, monitor="val/score", **options)
    said = capsys.readouterr().out
    assert (f"never validates, and nothing logs val/score, {NOTE}" in said) is is_said
    assert (NOTE in said) is is_said
