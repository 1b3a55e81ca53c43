from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from samestep.callbacks.checkpoints import BestCheckpoint
from samestep.callbacks.monitors import Monitors
from samestep.errors import ConfigError
from samestep.hydra import build
from samestep.hydra.compose import check
from samestep.run.checkpoint import load
from tests.samestep.callbacks.tiny import Tiny, fit

KEY = "callbacks.best.monitor"


class NoSteps(Tiny):
    def training_step(self, batch, batch_idx):
        raise AssertionError("a step was taken")


def test_a_wrong_monitor_is_found_before_the_first_step(tmp_path: Path):
    with pytest.raises(ConfigError, match=f"^{KEY}=val/accuracy: validation logs val/score; choo"):
        fit(tmp_path, NoSteps([1.0]), Monitors({KEY: "val/accuracy"}), num_sanity_val_steps=1)


def test_so_is_that_of_a_schedule(tmp_path: Path):
    class Plateau(NoSteps):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            config = {"scheduler": schedule, "monitor": "valid_loss"}
            return {"optimizer": optimizer, "lr_scheduler": config}

    with pytest.raises(ConfigError, match="the schedule ReduceLROnPlateau, monitor=valid_loss: "):
        fit(tmp_path, Plateau([1.0]), Monitors({}), num_sanity_val_steps=1)


@pytest.mark.parametrize("name", ["val/score", "train_loss"])
def test_other_monitors_are_not_rejected(tmp_path: Path, name: str):
    trainer = fit(tmp_path, Tiny([1.0]), Monitors({KEY: name}), num_sanity_val_steps=1)
    assert trainer.global_step == 12


def test_a_model_that_names_its_metrics_needs_no_validation_before():
    trainer = build.build_parts(check(["run_id=test"])).trainer
    assert trainer.num_sanity_val_steps == 0
    cfg = check(["run_id=test", "data=skeleton", "model=skeleton", f"{KEY}=val/loss"])
    assert build.build_parts(cfg).trainer.num_sanity_val_steps == 1
    cfg.trainer.num_sanity_val_steps = 0
    assert build.build_parts(cfg).trainer.num_sanity_val_steps == 0


def best(trainer) -> BestCheckpoint:
    (found,) = (c for c in trainer.callbacks if isinstance(c, BestCheckpoint))
    return found


def test_without_a_monitor_the_last_weights_are_the_best(tmp_path: Path, capsys):
    trainer = fit(tmp_path, Tiny(), monitor=None)
    assert best(trainer).step == 12
    assert load(tmp_path / "checkpoints/best.ckpt")["global_step"] == 12
    (note,) = capsys.readouterr().out.splitlines()
    assert note == (
        "Note: callbacks.best.monitor=null chooses no metric, so the last weights are tested, "
        "not the best ones"
    )
    data = DataLoader(torch.ones(2, 2))
    trainer.test(Tiny(), data, ckpt_path=str(tmp_path / "checkpoints/best.ckpt"), verbose=False)
    trainer = fit(tmp_path, Tiny(), monitor=None, max_epochs=4, ckpt="last.ckpt")
    assert load(tmp_path / "checkpoints/best.ckpt")["global_step"] == 16


@pytest.mark.parametrize(
    "options", [{"limit_val_batches": 0}, {"check_val_every_n_epoch": 4}], ids=str
)
def test_a_run_that_never_validates_says_so(tmp_path: Path, capsys, options):
    fit(tmp_path, Tiny([1.0]), **options)
    (note,) = capsys.readouterr().out.splitlines()
    assert "never validates, and nothing logs val/score, so the last weights are tested" in note


def test_one_that_validates_later_does_not(tmp_path: Path, capsys):
    fit(tmp_path, Tiny([1.0]), check_val_every_n_epoch=2)
    assert capsys.readouterr().out == ""
