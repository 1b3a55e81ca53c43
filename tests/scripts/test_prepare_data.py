"""The doorway: any DataModule prepares its data, and a data set is downloaded where runs do not."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import prepare_data
import pytest

from samestep.command_line import call
from tests.conftest import ROOT

SKELETON = [
    "model=skeleton", "callbacks.checkpoints.monitor=val/loss", "callbacks.checkpoints.mode=min",
]  # fmt: skip


def squares(root: str, train: bool, download: bool):
    """A data set of ten images, in a file."""
    file = Path(root, "squares.npy")
    if download:
        np.save(file, np.zeros((10, 28, 28), np.uint8))
    if not file.exists():
        raise RuntimeError("squares.npy is missing")
    images = np.load(file)
    return SimpleNamespace(data=images, targets=np.zeros(len(images)), classes=[*range(10)])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data=digits"], "ready: data=digits train_set=1257 val_set=180 test_set=360\n"),
        (["data=skeleton", *SKELETON], "ready: data=skeleton\n"),
    ],
)
def test_any_data_are_prepared(capsys: pytest.CaptureFixture[str], words: list[str], said: str):
    assert call(lambda: prepare_data.main(words)) == 0
    assert capsys.readouterr().out == said


def test_files_are_downloaded_though_the_runs_of_a_cluster_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    target = f"data.dataset._target_={__name__}.squares"
    words = ["cluster=k8s", "data=mnist", f"data.root={tmp_path}", "data.num_val=4", target]
    words.append("data.global_batch_size=6")
    assert call(lambda: prepare_data.main(words)) == 0
    assert "ready: data=mnist train_set=6 val_set=4 test_set=10" in capsys.readouterr().out
    assert (tmp_path / "squares.npy").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["data=null", *SKELETON], 2, "error: data=null: there is no DataModule to prepare"),
        (["data=folder", "data.num_classes=2", "data.root=gone"], 1, "error: data.root=gone: "),
    ],
)
def test_what_cannot_be_prepared_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: list[str], code: int, message: str,
):  # fmt: skip
    monkeypatch.setenv("SAMESTEP_PROJECT", str(ROOT))
    monkeypatch.chdir(tmp_path)
    assert call(lambda: prepare_data.main(words)) == code
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1
    assert not [*tmp_path.iterdir()]
