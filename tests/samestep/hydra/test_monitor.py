"""``callbacks.checkpoints.monitor`` of a configuration."""

from pathlib import Path

from library.tests.callbacks.tiny import Tiny, fit
from samestep.hydra import build
from samestep.hydra.compose import check
from samestep.run import lifecycle, manifest

KEY = "callbacks.checkpoints"


def test_one_validation_batch_finds_a_wrong_monitor_before_the_first_step():
    words = ["run_id=test", "data=skeleton", "model=skeleton", f"{KEY}.mode=min"]
    cfg = check([*words, f"{KEY}.monitor=val/loss"])
    assert build.build_trainer(cfg).num_sanity_val_steps == 2
    cfg.trainer.num_sanity_val_steps = 0
    assert build.build_trainer(cfg).num_sanity_val_steps == 0


def test_without_a_monitor_there_is_no_best_checkpoint_and_the_last_one_is_tested(tmp_path: Path):
    fit(tmp_path, Tiny([0.5]), monitor=None)
    assert not (tmp_path / "checkpoints/best.ckpt").exists()
    assert manifest.tested_checkpoint(tmp_path) == "last"
    assert lifecycle.find_best(tmp_path) is None
