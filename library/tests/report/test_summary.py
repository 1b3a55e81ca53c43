import json
import shlex
from pathlib import Path

import pytest
import yaml

from library.tests.report.fake import make_run
from samestep.report.files import read_run
from samestep.report.summary import facts_of, resume_command, show_last_losses, summarize
from samestep.run import record
from samestep.run.checkpoint import AtomicCheckpointIO
from samestep.run.metrics import count_epochs, count_steps


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run with a checkpoint, in a directory with a space in its name."""
    run_dir = make_run(tmp_path / "my run", words=("seed=3", "trainer.max_epochs=3"))
    config = {"run_dir": str(run_dir), "run_id": "mine", "report": True}
    config["summary"] = {"next": [f"python evaluate.py {run_dir}"]}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config | {"trainer": {"max_epochs": 3}}))
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints/best.ckpt").touch()
    return run_dir


def test_the_summary_says_what_the_files_say(run_dir: Path):
    assert (
        summarize(run_dir)
        == f"""\
Finished: {run_dir}
  epochs         3
  test/score     0.8750
  val/score      0.7000 in epoch 3
  last epoch     train/loss 0.3333, val/loss 0.2500
  training time  6.0 s
  points/s       100.0
Report
  {run_dir}/report.html
Next
  python evaluate.py '{run_dir}'
  RUN_ID=mine python train.py seed=3 trainer.max_epochs=6"""
    )


def test_the_mean_of_the_last_epoch_is_beside_that_of_its_validation():
    step = {"train/loss": 9.0, "step/loss": 9.0}
    first = {**step, "train/loss_epoch": 4.0, "val/loss": 5.0, "time/epoch_s": 1.0}
    last = first | {"train/loss_epoch": 2.0, "val/loss": 3.0, "train/penalty_loss": 1.0}
    rows = [step, first, step, last, {"test/loss": 6.0}]
    assert show_last_losses(rows) == {"last epoch": "train/loss 2.000, val/loss 3.000"}
    assert show_last_losses([dict(reversed(last.items()))]) == show_last_losses(rows)
    forked = {"train_loss_step": 9.0, "train_loss_epoch": 2.0, "val_loss": 3.0, "time/epoch_s": 1.0}
    assert show_last_losses([forked]) == {"last epoch": "train_loss 2.000, val_loss 3.000"}
    # Without a validation there is nothing to compare, and without an epoch no mean.
    assert show_last_losses([{"train/loss": 2.0, "time/epoch_s": 1.0}]) == {}
    assert show_last_losses([step]) == {}


def test_every_metric_of_a_test_is_named_unless_it_is_a_part_of_another(run_dir: Path):
    metrics = {"test_mae": 2.5, "val_mae": 2.0, "test/loss": 1.0, "testing": 3.0, "test/bad": None}
    metrics |= {"iou/test": 0.5, "iou/val": 0.25, "contest": 1.0}
    metrics |= {f"test/score_{number}": 0.5 for number in range(2)}
    (run_dir / "metrics.json").write_text(json.dumps(metrics))
    facts = facts_of(read_run(run_dir))
    assert {name: fact for name, fact in facts.items() if "test" in name} == {
        "iou/test": "0.5000",
        "test/bad": "nan", "test/loss": "1.000", "test/score_0": "0.5000",
        "test/score_1": "0.5000", "test_mae": "2.500",
    }  # fmt: skip
    (run_dir / "metrics.json").write_text(json.dumps(metrics | {"test/score": 0.75}))
    assert "test/score_0" not in facts_of(read_run(run_dir))


def test_commands_that_need_a_checkpoint_are_named_if_there_is_one(run_dir: Path):
    (run_dir / "checkpoints/best.ckpt").unlink()
    assert "evaluate.py" not in summarize(run_dir)  # of callbacks=null
    for best_step in 1, None:
        last = {"global_step": 2, "best_step": best_step}
        AtomicCheckpointIO().save_checkpoint(last, run_dir / "checkpoints/last.ckpt")
        # The best one is lost, or without a monitor there is none.
        assert ("evaluate.py" in summarize(run_dir)) == (best_step is None)


def test_the_command_names_the_run_and_not_its_directory(tmp_path: Path):
    cfg = {"run_id": "mine", "run_dir": f"{tmp_path}/here"}
    assert resume_command(cfg, tmp_path / "here", None) == "RUN_ID=mine python train.py"
    moved = resume_command(cfg, tmp_path / "moved", None)
    assert moved == "RUN_ID=moved python train.py", "it must not start over in its old place"
    typed = {"command": ["train.py", "run_id=mine", "seed=1"]}
    (tmp_path / "moved").mkdir()
    record.update(tmp_path / "moved", record.FINISHED, starts=[typed])
    moved = resume_command(cfg, tmp_path / "moved", None)
    assert moved == "RUN_ID=moved python train.py seed=1", "a typed name would win"


def test_the_summary_of_a_run_on_a_cluster_names_the_launcher(tmp_path: Path, monkeypatch):
    cluster = "k8s"
    words = ["train.py", f"cluster={cluster}", "trainer.num_nodes=2", "trainer.max_epochs=3"]
    record.update(tmp_path, record.FINISHED, starts=[{"command": words}])
    cfg = {"cluster": {"name": cluster}}
    by_hand = f"RUN_ID={tmp_path.name} python train.py cluster={cluster} trainer.num_nodes=2 "
    assert resume_command(cfg, tmp_path, 3) == f"{by_hand}trainer.max_epochs=6"
    assert resume_command(cfg, tmp_path, 0) == f"{by_hand}trainer.max_epochs=3", "not 2 * 0"
    monkeypatch.setenv("SAMESTEP_ON_CLUSTER", "1")  # by the entry point
    assert resume_command(cfg, tmp_path, 3) == (
        f"RUN_ID={tmp_path.name} samestep launch cluster={cluster} trainer.num_nodes=2 "
        "trainer.max_epochs=6"
    )


@pytest.mark.parametrize(
    ("trainer", "limit"),
    [
        ({"max_epochs": 3}, 6),
        # Early stopping, a limit of time, or of steps has ended these.
        ({"max_epochs": 20}, 23),
        ({"max_epochs": 4, "max_time": "00:00:10:00"}, 7),
        ({"max_epochs": -1, "max_steps": 50}, 6),
    ],
    ids=["epochs", "early stopping", "time", "steps"],
)
def test_a_finished_run_is_trained_for_as_many_epochs_more(tmp_path: Path, trainer, limit: int):
    command = ["train.py", "model=mlp", "trainer.max_steps=50", "callbacks.mine.patience=5"]
    limits = {"callbacks.mine.patience": 5, "callbacks.default.patience": 3}
    record.update(tmp_path, record.FINISHED, starts=[{"command": command}], limits=limits)
    cfg = {"trainer": trainer, "callbacks": {"mine": {"patience": 5}, "default": {}}}
    again = shlex.split(resume_command(cfg, tmp_path, 3))
    patience = 10 if trainer["max_epochs"] > 3 else 5
    words = {"model=mlp", f"trainer.max_epochs={limit}", f"callbacks.mine.patience={patience}"}
    assert set(again[3:]) == words


def test_epochs_of_a_module_with_names_of_its_own_are_counted():
    rows = [{"step": 3.0, "epoch": 0.0, "train_loss": 1.0, "time/epoch_s": 2.0}]
    rows.append({"step": 4.0, "epoch": 1.0, "test_loss": 1.0})
    assert (count_epochs(rows), count_steps(rows)) == (1, 4)
