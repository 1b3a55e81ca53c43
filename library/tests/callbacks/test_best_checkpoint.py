import os
import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch import callbacks
from torch.utils.data import DataLoader

from library.tests.callbacks.tiny import Tiny, fit, killed_before_the_link
from library.tests.canaries import needs_averaging
from samestep.errors import ConfigError
from samestep.plugins.monitor_check import MonitorCheck
from samestep.run import files, lifecycle
from samestep.run.checkpoint import CheckpointError, find_valid, load


def best_step(run_dir: Path) -> int:
    return load(run_dir / "checkpoints/best.ckpt")["global_step"]


@pytest.mark.parametrize(
    ("mode", "scores", "step"),
    [
        ("max", [0.7, 0.7, float("nan")], 4),
        ("min", [float("inf"), 5.0, float("-inf")], 12),
        ("max", [float("nan")], None),
    ],
)
def test_the_best_epoch_is_kept(tmp_path: Path, mode: str, scores: list[float], step: int | None):
    fit(tmp_path, Tiny(scores), mode=mode)
    last, best = (tmp_path / f"checkpoints/{name}.ckpt" for name in ("last", "best"))
    assert best.exists() is (step is not None)
    if step:
        assert best_step(tmp_path) == step
        assert last.samefile(best) is (step == 12), "a second name of the last checkpoint"
        assert load(best)["checkpoints"]["best_score"] == pytest.approx(scores[step // 4 - 1])


def test_a_disk_without_hard_links_gets_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(self: Path, target: Path) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    fit(tmp_path, Tiny([1.0, 2.0]), max_epochs=2)
    last, best = (tmp_path / f"checkpoints/{name}.ckpt" for name in ("last", "best"))
    assert not last.samefile(best)
    assert files.sha256_of(last) == files.sha256_of(best)
    assert best_step(tmp_path) == 8


def test_a_metric_that_is_not_logged_is_refused_naming_those_that_are(tmp_path: Path):
    class Other(Tiny):
        def on_validation_epoch_end(self):
            self.log_dict({"val/loss": 1.0, "val/other": 2.0})

    message = r"monitor=val/score: the run logs val/loss, val/other"
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


@pytest.mark.parametrize(("interval", "step"), [(2, 6), (0.75, 7)])
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
        fit(tmp_path, Tiny([0.1]), MonitorCheck(), val_check_interval=3, accumulate_grad_batches=2)


@needs_averaging
def test_with_averaged_weights_the_average_is_kept_and_evaluated(tmp_path: Path):
    weights = []

    class Noting(Tiny):
        def on_validation_epoch_end(self):
            super().on_validation_epoch_end()
            weights.append(self.layer.weight.detach().clone())

        on_test_epoch_end = on_validation_epoch_end

    model, path = Noting([0.1, 0.3, 0.2]), tmp_path / "checkpoints/best.ckpt"
    trainer = fit(tmp_path, model, callbacks.EMAWeightAveraging(decay=0.9))
    best = load(path)
    assert best["global_step"] == 8
    assert (best["state_dict"]["layer.weight"] != best["current_model_state"]["layer.weight"]).any()
    for evaluate in (trainer.validate, trainer.test):
        evaluate(model, DataLoader(torch.ones(2, 2)), ckpt_path=path, verbose=False)
        assert torch.equal(weights[-1], best["state_dict"]["layer.weight"])


def test_other_weights_than_the_best_ones_are_never_tested(tmp_path: Path):
    best = tmp_path / "checkpoints/best.ckpt"
    fit(tmp_path, Tiny([0.1]), max_epochs=1)
    older = best.read_bytes()  # it was the best one once
    fit(tmp_path, Tiny([0.1, 0.3, 0.2]), max_epochs=3, ckpt="last.ckpt")
    assert lifecycle.find_best(tmp_path) == str(best)
    last = best.with_name("last.ckpt").read_bytes()
    for content, is_now in (
        (None, "missing, or damaged"),
        (older[:-1], "missing, or damaged"),
        (older, "from step 4"),
        (last, "from step 12"),
    ):
        best.unlink(missing_ok=True)
        if content:
            best.write_bytes(content)
        message = (
            rf"best.ckpt cannot be used: it is {is_now}, and the best checkpoint is from step 8"
        )
        with pytest.raises(CheckpointError, match=message + r".*larger max_epochs"):
            lifecycle.find_best(tmp_path)


def kept(run_dir: Path) -> dict[str, int]:
    """The numbered checkpoints, which are verified by loading them, and their steps."""
    paths = sorted((run_dir / "checkpoints").glob("epoch-*.ckpt"))
    return {path.stem: load(path)["global_step"] for path in paths}


def test_a_run_killed_before_the_link_links_when_it_continues(tmp_path: Path):
    with killed_before_the_link():
        fit(tmp_path, Tiny([0.1, 0.3, 0.2]), every_n_epochs=2)
    assert (best_step(tmp_path), kept(tmp_path)) == (4, {})
    fit(tmp_path, Tiny([0.1, 0.3, 0.2]), ckpt="last.ckpt", every_n_epochs=2)
    assert (best_step(tmp_path), kept(tmp_path)) == (8, {"epoch-0002": 8})


@pytest.mark.parametrize("harm", ["delete", "damage", "last"])
def test_a_best_checkpoint_that_is_lost_is_said(tmp_path: Path, harm: str, caplog):
    fit(tmp_path, Tiny([0.3, 0.2, 0.1]), max_epochs=3)
    best = tmp_path / "checkpoints/best.ckpt"
    if harm == "damage":
        os.truncate(best, 100)
    else:
        best.unlink()
    if harm == "last":
        shutil.copy(tmp_path / "checkpoints/last.ckpt", best)
    assert find_valid(tmp_path / "checkpoints")[0].name == "last.ckpt"
    fit(tmp_path, Tiny([0.0, 0.0, 0.0, 0.1]), ckpt="last.ckpt", max_epochs=4)
    assert "best.ckpt is not the best checkpoint, of step 4" in caplog.text
    assert best_step(tmp_path) == 16


def test_epochs_are_kept_beside_last_and_best_and_replace_them(tmp_path: Path, caplog):
    every = {"every_n_epochs": 2}
    fit(tmp_path, Tiny([0.1, 0.9, 0.3, 0.2]), max_epochs=4, **every)
    assert kept(tmp_path) == {"epoch-0002": 8, "epoch-0004": 16}
    folder = tmp_path / "checkpoints"
    last, best = folder / "last.ckpt", folder / "best.ckpt"
    assert last.samefile(folder / "epoch-0004.ckpt"), "another name"
    # The best one is linked again where it has another name.
    best.unlink()
    fit(tmp_path, Tiny([0.0]), ckpt="last.ckpt", max_epochs=5, **every)
    assert best_step(tmp_path) == 8
    assert "best.ckpt is not" not in caplog.text
    # A run can continue from an epoch that was kept.
    for name in ("last.ckpt", "last-previous.ckpt"):
        (folder / name).unlink()
    assert find_valid(folder)[0] == folder / "epoch-0004.ckpt"
