"""A finished run, tested again."""

import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import lightning as L
import pytest
import torch
import yaml
from omegaconf import OmegaConf
from PIL import Image
from torch.utils.data import DataLoader

from samestep import export, predict
from samestep.errors import ConfigError
from samestep.evaluate import main
from samestep.hydra.compose import check
from samestep.hydra.saved_run import evaluate, load_run, make_trainer
from tests.conftest import NO_PICTURES, QUICK, run, run_ranks

EVALUATE = ("-m", "samestep", "evaluate")


def evaluated(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What ``main`` prints for these words."""
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def metrics(run_dir: Path, stage: str) -> dict[str, float]:
    found = json.loads((run_dir / "metrics.json").read_text())
    return {name: value for name, value in found.items() if name.startswith(f"{stage}/")}


@pytest.mark.program
def test_the_best_checkpoint_gives_the_metrics_of_the_run(digits_run: Path) -> None:
    result = run(*EVALUATE, str(digits_run), "--format", "json")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout) == metrics(digits_run, "test")
    assert {*metrics(digits_run, "test")} == {"test/accuracy", "test/loss"}


def test_the_last_checkpoint_gives_the_last_validation(
    digits_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--split", "val", "--ckpt", "last", "--format", "json"]
    assert json.loads(evaluated(capsys, digits_run, *words)) == metrics(digits_run, "val")


def test_what_a_checkpoint_leaves_out_has_the_weights_that_the_run_began_with(
    digits_run: Path,
) -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with mock.patch.object(L.LightningModule, "load_state_dict"):
            model, _ = load_run(digits_run, "last", ["project"])
        found.append(model.state_dict())
        # The numbers of the program go on as they were.
        assert torch.initial_seed() == seed
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_kernels_are_chosen_as_in_the_run(digits_run: Path, tmp_path: Path) -> None:
    cfg = OmegaConf.load(digits_run / "config.yaml")
    cfg.trainer.deterministic = True
    OmegaConf.save(cfg, tmp_path / "config.yaml")
    try:
        make_trainer(tmp_path, "cpu")
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_table_names_run_checkpoint_split_and_metrics(
    digits_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    title, *lines = evaluated(capsys, digits_run).splitlines()
    assert title == f"{digits_run}, best checkpoint, test"
    found = metrics(digits_run, "test")
    assert dict(line.split() for line in lines) == {k: f"{v:.4f}" for k, v in found.items()}


def test_nan_is_null_in_json(
    digits_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"test/loss": float("nan"), "test/accuracy": 0.5, "test/other": float("inf")}
    monkeypatch.setattr("samestep.hydra.saved_run.evaluate", lambda *_: found)
    assert main([str(digits_run), "--format", "json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"test/loss": None, "test/accuracy": 0.5, "test/other": None}
    assert said.err == "warning: nan or infinite: test/loss, test/other\n"
    assert evaluated(capsys, digits_run).splitlines()[1].split() == ["test/loss", "nan"]
    monkeypatch.setattr("samestep.hydra.saved_run.evaluate", lambda *_: {})
    assert len(evaluated(capsys, digits_run).splitlines()) == 1, "an empty table"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without accelerator")
def test_an_accelerator_that_is_not_there_is_refused(
    digits_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="--accelerator gpu"):
        evaluated(capsys, digits_run, "--accelerator", "gpu")


@pytest.mark.program
def test_data_are_looked_for_where_the_options_say(tmp_path: Path) -> None:
    from samestep.hydra import build
    from samestep.run.checkpoint import AtomicCheckpointIO

    cfg = check(["data=mnist", "model=mlp", f"run_root={tmp_path}", "run_id=mnist"])
    (tmp_path / "mnist" / "checkpoints").mkdir(parents=True)
    (tmp_path / "mnist" / "config.yaml").write_text(
        yaml.safe_dump(OmegaConf.to_container(cfg, resolve=True))
    )
    parts = {"state_dict": build.build_model(cfg), "ImageDataModule": build.build_datamodule(cfg)}
    state = {name: part.state_dict() for name, part in parts.items()}
    AtomicCheckpointIO().save_checkpoint(state, tmp_path / "mnist" / "checkpoints" / "last.ckpt")

    words = [str(tmp_path / "mnist"), "--ckpt", "last", "--no-download"]
    result = run(*EVALUATE, *words, "--data-root", f"{tmp_path}/elsewhere")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert f"{tmp_path}/elsewhere" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.program
def test_a_missing_checkpoint_and_a_damaged_one_are_one_line(
    digits_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").write_text((digits_run / "config.yaml").read_text())
    result = run(*EVALUATE, str(tmp_path))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ckpt=best: ")
    assert result.stderr.count("\n") == 1

    (tmp_path / "checkpoints" / "best.ckpt").write_bytes(b"damaged")
    result = run(*EVALUATE, str(tmp_path))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {tmp_path}/checkpoints/best.ckpt cannot be used")
    assert result.stderr.count("\n") == 1


@pytest.mark.program
def test_a_run_without_a_best_checkpoint_is_evaluated_by_its_last_one_or_one_that_was_kept(
    shared_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed command has no --ckpt."""
    node = "callbacks.checkpoints"
    words = [*QUICK, NO_PICTURES, "model=mlp", f"{node}.monitor=null", f"{node}.every_n_epochs=2"]
    run_dir = shared_run("no-best", *words)
    assert f"samestep evaluate {run_dir}\n" in (run_dir.parent / "stdout.txt").read_text()
    title, *_ = evaluated(capsys, run_dir).splitlines()
    assert title == f"{run_dir}, last checkpoint, test"
    assert json.loads(evaluated(capsys, run_dir, "--format", "json")) == metrics(run_dir, "test")
    choose = ["--split", "val", "--format", "json", "--ckpt"]
    assert json.loads(evaluated(capsys, run_dir, *choose, "epoch-0002")) == metrics(run_dir, "val")
    with pytest.raises(ConfigError, match=r"ckpt=epoch-0001: .* holds epoch-0002, last"):
        evaluated(capsys, run_dir, *choose, "epoch-0001")


@pytest.mark.program
def test_a_run_that_was_sharded_over_two_ranks_is_read_by_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["trainer=fsdp", "trainer.accelerator=cpu", "model=mlp", "trainer.max_epochs=1"]
    # One checkpoint: on a busy machine a default run saves within the epoch too.
    words += ["callbacks.checkpoints.every_s=300"]
    done = run_ranks(
        "train.py", *words, f"run_root={tmp_path}", NO_PICTURES, "report=false", RUN_ID="sharded"
    )
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "sharded"
    assert len([*run_dir.glob("checkpoints/shards-*/*.shard")]) == 2
    found = json.loads(evaluated(capsys, run_dir, "--format", "json"))
    assert found == pytest.approx(metrics(run_dir, "test"), abs=1e-5)
    Image.new("L", (8, 8)).save(tmp_path / "image.png")
    assert predict.main([str(run_dir), str(tmp_path / "image.png")]) == 0
    assert "image.png" in capsys.readouterr().out
    assert export.main([str(run_dir)]) == 0
    assert (run_dir / "export/model.safetensors").exists()


class TwoSets(L.LightningModule):
    """Logs of two loaders, with noise, and once at the end; shows what it does to a tracker."""

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("mean", batch.mean() + torch.rand(1))
        if dataloader_idx == 0:
            self.log("shown", 1.0, logger=False, prog_bar=True, add_dataloader_idx=False)
        self.logger.experiment.add_scalar("mean", batch.mean(), batch_idx)

    def on_test_epoch_end(self):
        self.log("end", 1.0)

    def test_dataloader(self):
        return [DataLoader(torch.full((4, 1), value), batch_size=2) for value in (10.0, 20.0)]


def test_figures_of_all_loaders_are_there_and_repeat(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("seed: 1\ntrainer: {precision: 32-true}\n")
    figures = [evaluate(TwoSets(), None, tmp_path, "test", "cpu") for _ in range(2)]
    assert figures[0] == figures[1]
    first, second = "mean/dataloader_idx_0", "mean/dataloader_idx_1"
    assert set(figures[0]) == {first, second, "shown", "end"}
    # Each loader has noise of its own.
    assert 9 < figures[0][second] - figures[0][first] < 11
    assert figures[0][second] - figures[0][first] != 10
    (tmp_path / "config.yaml").write_text("seed: 2\ntrainer: {precision: 32-true}\n")
    assert evaluate(TwoSets(), None, tmp_path, "test", "cpu") != figures[0]
