"""A finished run, tested again."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from options import OPTIONS, options

from samestep.config.compose import check
from samestep.errors import ConfigError
from samestep.run.directory import load_run, resolved
from scripts.evaluate import main
from tests.conftest import run


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What ``main`` prints for these words."""
    values = options(words, OPTIONS["evaluate"], files=False)
    assert main(*load_run(values["run"], values["ckpt"]), values) == 0
    return capsys.readouterr().out


def metrics(run_dir: Path, stage: str) -> dict[str, float]:
    found = json.loads((run_dir / "metrics.json").read_text())
    return {name: value for name, value in found.items() if name.startswith(f"{stage}/")}


def test_the_best_checkpoint_gives_the_figures_of_the_run(digits_run: Path) -> None:
    result = run("scripts/evaluate.py", f"run={digits_run}", "format=json")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout) == metrics(digits_run, "test")
    assert len(metrics(digits_run, "test")) == 12  # loss, accuracy, and that of ten classes


def test_the_last_checkpoint_gives_the_last_validation(
    digits_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = evaluated(capsys, f"run={digits_run}", "split=val", "ckpt=last", "format=json")
    assert json.loads(text) == metrics(digits_run, "val")


def test_the_table_names_run_checkpoint_split_and_figures(
    digits_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    title, *lines = evaluated(capsys, f"run={digits_run}").splitlines()
    assert title == f"{digits_run}, best checkpoint, 360 test images"
    figures = metrics(digits_run, "test")
    assert dict(line.split() for line in lines) == {k: f"{v:.4f}" for k, v in figures.items()}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without accelerator")
def test_an_accelerator_that_is_not_there_is_refused(
    digits_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="accelerator=gpu"):
        evaluated(capsys, f"run={digits_run}", "accelerator=gpu")


def test_data_are_looked_for_where_the_options_say(tmp_path: Path) -> None:
    from samestep import build
    from samestep.run.checkpoint import AtomicCheckpointIO

    cfg = check(["data=mnist", "model=mlp", f"run_root={tmp_path}", "run_id=mnist"])
    (tmp_path / "mnist" / "checkpoints").mkdir(parents=True)
    (tmp_path / "mnist" / "config.yaml").write_text(yaml.safe_dump(resolved(cfg)))
    parts = {"state_dict": build.model(cfg), "ImageDataModule": build.datamodule(cfg)}
    state = {name: part.state_dict() for name, part in parts.items()}
    AtomicCheckpointIO().save_checkpoint(state, tmp_path / "mnist" / "checkpoints" / "last.ckpt")

    words = [f"run={tmp_path / 'mnist'}", "ckpt=last", "data.download=false"]
    result = run("scripts/evaluate.py", *words, f"data.root={tmp_path}/elsewhere")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert f"{tmp_path}/elsewhere" in result.stderr
    assert "Traceback" not in result.stderr
