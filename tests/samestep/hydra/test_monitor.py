"""``callbacks.best.monitor`` of a configuration."""

from pathlib import Path

from library.tests.callbacks.tiny import Tiny, fit
from samestep.hydra import build
from samestep.hydra.compose import check
from samestep.run.checkpoint import load

KEY = "callbacks.best.monitor"


def test_a_model_that_names_its_metrics_needs_no_validation_before():
    trainer = build.build_parts(check(["run_id=test"])).trainer
    assert trainer.num_sanity_val_steps == 0
    cfg = check(["run_id=test", "data=skeleton", "model=skeleton", f"{KEY}=val/loss"])
    assert build.build_parts(cfg).trainer.num_sanity_val_steps == 1
    cfg.trainer.num_sanity_val_steps = 0
    assert build.build_parts(cfg).trainer.num_sanity_val_steps == 0


def test_without_a_monitor_the_last_weights_are_the_best(tmp_path: Path, capsys):
    fit(tmp_path, Tiny(), monitor=None)
    assert load(tmp_path / "checkpoints/best.ckpt")["global_step"] == 12
    (note,) = capsys.readouterr().out.splitlines()
    assert note == (
        "Note: callbacks.best.monitor=null chooses no metric, so the last weights are tested, "
        "not the best ones"
    )
    fit(tmp_path, Tiny(), monitor=None, max_epochs=4, ckpt="last.ckpt")
    assert load(tmp_path / "checkpoints/best.ckpt")["global_step"] == 16
