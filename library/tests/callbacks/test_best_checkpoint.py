import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader

from library.tests.callbacks.tiny import Tiny, fit, killed_before_the_link
from samestep.errors import ConfigError
from samestep.run import directory, files
from samestep.run.checkpoint import CheckpointError, find_valid, load

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*treespec, LeafSpec"
)


@pytest.fixture(autouse=True)
def _signals_end_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.ranks.stopping.defer", lambda: None)


def best_step(run_dir: Path) -> int:
    return load(run_dir / "checkpoints/best.ckpt")["global_step"]


@pytest.mark.parametrize(
    ("mode", "scores", "step"),
    [
        ("max", [0.5, 0.7, 0.6], 8),
        ("max", [0.7, 0.7, 0.7], 4),
        ("min", [0.5, 0.7, 0.4], 12),
        ("max", [float("nan"), 0.1, float("nan")], 8),
        ("min", [float("inf"), 5.0, float("-inf")], 12),
    ],
)
def test_the_best_epoch_is_kept(tmp_path: Path, mode: str, scores: list[float], step: int):
    fit(tmp_path, Tiny(scores), mode=mode)
    assert best_step(tmp_path) == step
    state = load(tmp_path / "checkpoints/best.ckpt")["checkpoints"]
    assert state["best_score"] == pytest.approx(scores[step // 4 - 1])


def test_it_is_the_last_checkpoint_under_a_second_name(tmp_path: Path):
    fit(tmp_path, Tiny([1.0, 2.0, 3.0]))
    last, best = (tmp_path / f"checkpoints/{name}.ckpt" for name in ("last", "best"))
    assert last.samefile(best)


def test_a_disk_without_hard_links_gets_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(self: Path, target: Path) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    fit(tmp_path, Tiny([1.0, 2.0]), max_epochs=2)
    last, best = (tmp_path / f"checkpoints/{name}.ckpt" for name in ("last", "best"))
    assert not last.samefile(best)
    assert files.sha256_of(last) == files.sha256_of(best)
    assert best_step(tmp_path) == 8


def test_without_a_number_there_is_no_best_epoch(tmp_path: Path):
    fit(tmp_path, Tiny([float("nan")]))
    assert not (tmp_path / "checkpoints/best.ckpt").exists()


def test_a_metric_that_is_not_logged_is_refused_naming_those_that_are(tmp_path: Path):
    class Other(Tiny):
        def on_validation_epoch_end(self):
            self.log_dict({"val/loss": 1.0, "val/other": 2.0})

    message = r"callbacks.checkpoints.monitor=val/score: the run logs val/loss, val/other"
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, Other())


def test_validation_may_come_less_often_than_an_epoch(tmp_path: Path):
    fit(tmp_path, Tiny([0.1, 0.2, 0.3, 0.0]), max_epochs=5, check_val_every_n_epoch=2)
    assert best_step(tmp_path) == 8
    fit(
        tmp_path, Tiny([0.0]), max_epochs=7, ckpt="last.ckpt", check_val_every_n_epoch=3
    )  # the first epoch of this process has no validation
    assert best_step(tmp_path) == 8


class Watched(Tiny):
    """Learns a little in each step, and remembers the weights of each validation by its step."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__(scores)
        self.validated: dict[int, torch.Tensor] = {}

    def on_validation_epoch_end(self):
        if self.trainer.sanity_checking:
            return
        number = min(len(self.validated), len(self.scores) - 1)
        self.log("val/score", self.scores[number])
        self.validated[self.global_step] = self.layer.weight.detach().clone()


@pytest.mark.parametrize(
    ("interval", "step"), [(2, 6), (3, 7), (0.5, 6), (0.75, 7)], ids=["2", "3", "half", "three"]
)
def test_the_best_checkpoint_holds_the_weights_that_were_validated(
    tmp_path: Path, interval: float, step: int
):
    # Of 4 batches: 3 is followed by a step that is never validated.
    scores = [0.1, 0.2, 0.4, 0.3] if step == 6 else [0.1, 0.4, 0.3]
    model = Watched(scores)
    fit(tmp_path, model, val_check_interval=interval)
    best = load(tmp_path / "checkpoints/best.ckpt")
    assert best["global_step"] == best_step(tmp_path) == step
    assert torch.equal(best["state_dict"]["layer.weight"], model.validated[step])
    assert best["checkpoints"]["best_score"] == pytest.approx(0.4)


def test_a_validation_within_an_optimizer_step_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"after 3 batches .* step of 2 batches"):
        fit(tmp_path, Tiny([0.1]), val_check_interval=3, accumulate_grad_batches=2)
    fit(tmp_path, Tiny([0.1]), val_check_interval=2, accumulate_grad_batches=2)


def test_fast_dev_run_saves_nothing(tmp_path: Path):
    fit(tmp_path, Tiny([0.1]), fast_dev_run=True)
    assert not (tmp_path / "checkpoints").exists()


def test_with_averaged_weights_the_average_is_kept(tmp_path: Path):
    model = Tiny([0.1, 0.3, 0.2])
    trainer = fit(tmp_path, model, EMAWeightAveraging(decay=0.9))
    best = load(tmp_path / "checkpoints/best.ckpt")
    assert best["global_step"] == 8
    assert (best["state_dict"]["layer.weight"] != best["current_model_state"]["layer.weight"]).any()
    assert trainer.is_global_zero


@pytest.mark.parametrize("function", ["validate", "test"])
def test_with_averaged_weights_the_average_is_evaluated(tmp_path: Path, function: str):
    weights = []

    class Noting(Tiny):
        def on_validation_epoch_end(self):
            super().on_validation_epoch_end()
            weights.append(self.layer.weight.detach().clone())

        on_test_epoch_end = on_validation_epoch_end

    model, best = Noting([0.1]), tmp_path / "checkpoints/best.ckpt"
    trainer = fit(tmp_path, model, EMAWeightAveraging(decay=0.9), max_epochs=1)
    evaluate = getattr(trainer, function)
    evaluate(model, DataLoader(torch.ones(2, 2)), ckpt_path=best, verbose=False)
    assert torch.equal(weights[-1], load(best)["state_dict"]["layer.weight"])


@pytest.mark.parametrize("harm", ["delete", "cut", "older", "last"])
def test_other_weights_than_the_best_ones_are_never_tested(tmp_path: Path, harm: str):
    best = tmp_path / "checkpoints/best.ckpt"
    fit(tmp_path, Tiny([0.1]), max_epochs=1)
    older = best.read_bytes()
    fit(tmp_path, Tiny([0.1, 0.3, 0.2]), max_epochs=3, ckpt="last.ckpt")
    assert directory.best_checkpoint(tmp_path) == str(best)
    best.unlink()
    match harm:
        case "cut":
            best.write_bytes(older[:-1])
        case "older":
            best.write_bytes(older)  # it was the best one once
        case "last":
            shutil.copy(best.with_name("last.ckpt"), best)
    is_now = {"older": "from step 4", "last": "from step 12"}.get(harm, "missing, or damaged")
    message = rf"best.ckpt cannot be used: it is {is_now}, and the best checkpoint is from step 8"
    with pytest.raises(CheckpointError, match=message + r".*larger trainer.max_epochs"):
        directory.best_checkpoint(tmp_path)


def test_a_run_killed_before_the_link_links_when_it_continues(tmp_path: Path):
    with killed_before_the_link():
        fit(tmp_path, Tiny([0.1, 0.3, 0.2]))
    assert best_step(tmp_path) == 4
    fit(tmp_path, Tiny([0.1, 0.3, 0.2]), ckpt="last.ckpt")
    assert best_step(tmp_path) == 8


@pytest.mark.parametrize("harm", ["delete", "damage", "last"])
@pytest.mark.parametrize("better_comes", [True, False])
def test_a_best_checkpoint_that_is_lost_is_said(
    tmp_path: Path, harm: str, better_comes: bool, caplog: pytest.LogCaptureFixture
):
    fit(tmp_path, Tiny([0.3, 0.2, 0.1]), max_epochs=3)
    best = tmp_path / "checkpoints/best.ckpt"
    match harm:
        case "delete":
            best.unlink()
        case "damage":
            os.truncate(best, 100)
        case "last":
            best.unlink()
            shutil.copy(tmp_path / "checkpoints/last.ckpt", best)
    caplog.set_level(logging.WARNING)
    newest, _ = find_valid(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == "last.ckpt"
    fit(
        tmp_path, Tiny([0.0, 0.0, 0.0, 0.1, 0.05]), ckpt="last.ckpt",
        max_epochs=5 if better_comes else 3,
    )  # fmt: skip
    assert "best.ckpt is not the best checkpoint, of step 4" in caplog.text
    if better_comes:
        assert best_step(tmp_path) == 16


@pytest.mark.parametrize("kept", ["epoch-0001", "last-previous"])
def test_a_best_checkpoint_that_is_kept_under_another_name_is_linked_again(
    tmp_path: Path, kept: str, caplog
):
    every_epoch = {"every_n_epochs": 1 if kept == "epoch-0001" else None}
    num_epochs = 3 if kept == "epoch-0001" else 2
    fit(tmp_path, Tiny([0.3, 0.2, 0.1]), max_epochs=num_epochs, **every_epoch)
    best = tmp_path / "checkpoints/best.ckpt"
    best.unlink()
    fit(tmp_path, Tiny([0.0]), ckpt="last.ckpt", max_epochs=4, **every_epoch)
    assert best_step(tmp_path) == 4
    assert "best.ckpt is not" not in caplog.text
