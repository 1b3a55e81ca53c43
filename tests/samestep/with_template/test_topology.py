"""One run on different processes: the same images, the same losses, the same figures.

Two ranks: test_train.py. Three, which cannot share a batch equally: tests/labs/test_faults.py.
"""

import json
from pathlib import Path

import pytest

from tests.conftest import NO_PICTURES, QUICK, REFERENCE, final_metrics, run_ranks
from tests.project.test_train import record, recorded
from tests.slow_rank import losses, slow_net

pytestmark = pytest.mark.program

# 33 images are slices of 17 and 16; accumulated, they are batches of 16 and 17.
TRAIN = [*REFERENCE, "trainer.max_epochs=1", "data.global_batch_size=33"]


def test_options_agree_on_one_and_two_ranks(tmp_path: Path):
    """In float64, where rounding hides no small error in a weight of a sample."""
    options = ["trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.5"]
    options += ["callbacks=ema", "trainer.precision=64-true"]
    for num in (1, 2):
        result = run_ranks(
            "train.py", *TRAIN, *options, *record(tmp_path / str(num)), f"run_root={tmp_path}",
            nodes=(num,), RUN_ID=f"ranks-{num}",
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), abs=1e-9)
    one, two = final_metrics(tmp_path / "ranks-1"), final_metrics(tmp_path / "ranks-2")
    # Metrics are float32.
    assert two["val/loss"] == pytest.approx(one["val/loss"], abs=1e-6)


def test_unequal_nodes_learn_the_digits_and_count_every_image_once(tmp_path: Path):
    epochs = 3
    # The second node has two ranks, which get 2.5 times as much as that of the first.
    options = [*QUICK, "model=mlp", NO_PICTURES, f"trainer.max_epochs={epochs}"]
    options += ["cluster.shares=[1,2.5]", *record(tmp_path / "r"), f"run_root={tmp_path}"]
    # A set that is smaller than the number of ranks, too small to choose the best checkpoint by.
    options += ["data.num_val=2", "data.eval_batch_size=3", "callbacks.checkpoints.monitor=null"]
    options += ["trainer.limit_train_batches=20", "trainer.num_sanity_val_steps=0"]
    result = run_ranks("train.py", *options, nodes=(1, 2), RUN_ID="run")
    assert result.returncode == 0, result.stderr
    ranks = [json.loads((tmp_path / f"r/rank-{rank}.json").read_text()) for rank in range(3)]
    assert [len(rank[0]["ids"]) for rank in ranks] == [10, 25, 25]
    assert final_metrics(tmp_path / "run")["test/accuracy"] >= 0.5
    batches = recorded(tmp_path / "r", "train")
    assert len(batches) == epochs * 20
    for epoch in range(epochs):
        ids = [id for batch in batches[20 * epoch :][:20] for id in batch]
        assert len(ids) == len(set(ids)) == 1200
    for stage, count in {"val": epochs, "test": 1}.items():
        ids = [id for batch in recorded(tmp_path / "r", stage) for id in batch]
        assert len(ids) == count * len(set(ids)) > 0
    assert len(ids) > 300  # of the test
    assert [len(batch) for batch in recorded(tmp_path / "r", "val")] == [2] * epochs


def test_a_slow_rank_gets_less_and_the_losses_stay(reference_run: Path, tmp_path: Path):
    """Its share is measured in each epoch; a run that continues keeps that of its checkpoint."""
    command = [
        "train.py", "cluster.shares=auto", *REFERENCE,
        "model.net._target_=tests.slow_rank.TickingNet", slow_net(1, 5),
        "trainer.num_sanity_val_steps=0", *record(tmp_path / "records"), f"run_root={tmp_path}",
    ]  # fmt: skip
    killed = run_ranks(*command, RUN_ID="slow", KILL_AT="50")
    assert killed.returncode == -9, killed.stderr
    assert killed.stdout.count("Shares of the ranks: ") == 1
    assert "Shares of the ranks: 5, 1 (measured in epoch 1)" in killed.stdout

    continued = run_ranks(*command, RUN_ID="slow")
    assert continued.returncode == 0, continued.stderr
    ranks = [json.loads((tmp_path / f"records/rank-{n}.json").read_text()) for n in (0, 1)]
    fast, slow = (len(rank[0]["ids"]) for rank in ranks)
    assert (fast, slow) == (27, 5)
    one = reference_run.parent / "records"
    assert recorded(tmp_path / "records", "train") == recorded(one, "train")[39:]
    assert losses(tmp_path / "records") == pytest.approx(losses(one)[39:], abs=1e-4)
