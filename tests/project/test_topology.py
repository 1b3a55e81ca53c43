"""One run on different processes: the same images, the same losses, the same figures."""

import json
from pathlib import Path

import pytest
import torch

from tests.conftest import REFERENCE, run
from tests.faults.lab import Laboratory
from tests.project.test_train import metrics, record, recorded

TRAIN = [*REFERENCE, "trainer.max_epochs=1"]


def losses(directory: Path) -> list[float]:
    """Loss of each global batch: the mean over the ranks, whose shares are equal."""
    ranks = [json.loads(path.read_text()) for path in sorted(directory.glob("rank-*.json"))]
    curves = [[line["loss"] for line in rank if line["stage"] == "train"] for rank in ranks]
    return [sum(parts) / len(parts) for parts in zip(*curves, strict=True)]


@pytest.mark.parametrize("num", [2, 3, 4])
def test_several_ranks_have_the_loss_curve_of_one(reference_run: Path, tmp_path: Path, num: int):
    one, several = reference_run.parent / "records", tmp_path / "records"
    result = run(
        "train.py", f"trainer.devices={num}", *REFERENCE, *record(several),
        f"run_root={tmp_path}", RUN_ID="several",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr

    curve = losses(one)
    assert len(curve) == 40
    assert curve[-1] < curve[0]
    assert losses(several) == pytest.approx(curve, abs=1e-4)
    final, expected = metrics(tmp_path / "several"), metrics(reference_run)
    for name in ("train/loss", "val/loss", "test/loss"):
        assert final[name] == pytest.approx(expected[name], abs=1e-4)
    for stage in ("train", "val", "test"):
        assert recorded(several, stage) == recorded(one, stage)

    weights = torch.load(one / "weights-0.pt")
    assert len(list(several.glob("weights-*"))) == num
    for rank in range(num):
        ours = torch.load(several / f"weights-{rank}.pt")
        assert all(torch.allclose(ours[k], weights[k], atol=1e-4) for k in weights)


@pytest.mark.parametrize(
    "options",
    [
        ["trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.5", "callbacks=ema"],
        ["trainer.precision=bf16-mixed"],
    ],
    ids=["accumulation-clipping-ema", "bf16"],
)
def test_options_agree_on_one_and_two_ranks(tmp_path: Path, options: list[str]):
    for num in (1, 2):
        result = run(
            "train.py", f"trainer.devices={num}", *TRAIN, *options, *record(tmp_path / str(num)),
            f"run_root={tmp_path}", RUN_ID=f"ranks-{num}",
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
    tolerance = 0.02 if "trainer.precision=bf16-mixed" in options else 1e-4
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), abs=tolerance)
    one, two = metrics(tmp_path / "ranks-1"), metrics(tmp_path / "ranks-2")
    assert two["val/loss"] == pytest.approx(one["val/loss"], abs=tolerance)


def test_unequal_nodes_learn_the_digits_and_count_every_image_once(tmp_path: Path):
    lab = Laboratory(tmp_path, base=["trainer.accelerator=cpu", "data.global_batch_size=60"])
    codes, said = lab.launch("agents 1+2", tmp_path / "run", record(tmp_path / "r"))
    assert codes == [0, 0], said
    assert metrics(tmp_path / "run")["test/accuracy"] >= 0.97
    batches = recorded(tmp_path / "r", "train")
    assert len(batches) == 20 * 20  # epochs, steps
    for epoch in range(20):
        ids = [id for batch in batches[20 * epoch :][:20] for id in batch]
        assert len(ids) == len(set(ids)) == 1200
    for stage, count in {"val": 20, "test": 1}.items():
        ids = [id for batch in recorded(tmp_path / "r", stage) for id in batch]
        assert len(ids) == count * len(set(ids)) > 0
    assert not set(ids) - set(range(10_000))


def test_a_test_set_smaller_than_the_ranks_is_counted_once(tmp_path: Path):
    result = run(
        "train.py", "trainer.devices=4", *TRAIN, "trainer.limit_train_batches=1",
        "data.eval_batch_size=3", "data.num_val=2", *record(tmp_path / "r"),
        f"run_root={tmp_path}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert sorted(len(batch) for batch in recorded(tmp_path / "r", "val")) == [2]
    tested = [id for batch in recorded(tmp_path / "r", "test") for id in batch]
    assert len(tested) == len(set(tested)) > 300
