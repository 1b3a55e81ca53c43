"""Whole runs of text: the promises of every run, kept by a task that has no images."""

import shutil
import signal
from pathlib import Path

import pytest
import torch

from project.rules import needed_files
from samestep.errors import ConfigError
from samestep.hydra.compose import check
from scripts import evaluate, export, predict
from tests.conftest import ROOT, TEXT, final_figures, run, run_ranks
from tests.project.language import test_language
from tests.project.test_train import record, recorded

call = test_language.call  # a fixture


def weights(folder: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"weights-{rank}.pt")


def test_a_run_is_stopped_and_killed_and_continues_bit_by_bit(text_run: Path, tmp_path: Path):
    node = "+callbacks.signaller"
    target = f"{node}._target_=tests.signaller.Signaller"
    command = [
        "train.py", *TEXT, f"run_root={tmp_path}", "callbacks.checkpoints.every_s=1e-9",
        "report=false", target, f"{node}.dirpath={tmp_path}",
    ]  # fmt: skip
    # 5 and 11 steps are within the first epoch.
    for step, signum, code in ((5, signal.SIGTERM, 143), (11, signal.SIGKILL, -9)):
        ended = run(*command, RUN_ID="mine", SIGNAL_AT=f"{step} {signum:d} 0 rank")
        assert ended.returncode == code, ended.stderr
        (tmp_path / "done-0").unlink()  # one signal a process
    continued = run(*command, RUN_ID="mine")
    assert continued.returncode == 0, continued.stderr
    assert continued.stdout.startswith("Continuing")
    ours, expected = weights(tmp_path), weights(text_run.parent / "records")
    assert all(torch.equal(ours[key], expected[key]) for key in expected)
    assert final_figures(tmp_path / "mine") == final_figures(text_run)


def test_two_ranks_see_the_batches_of_one(text_run: Path, tmp_path: Path):
    two, one = tmp_path / "records", text_run.parent / "records"
    where = f"run_root={tmp_path}"
    done = run_ranks("train.py", *TEXT, *record(two), where, "report=false", RUN_ID="two")
    assert done.returncode == 0, done.stderr
    for stage in ("train", "val", "test"):
        assert recorded(two, stage) == recorded(one, stage)
        assert len(recorded(one, stage)) > 0
    final, expected = final_figures(tmp_path / "two"), final_figures(text_run)
    assert final == pytest.approx(expected, abs=1e-4)
    ours = weights(two)
    assert all(torch.allclose(ours[k], v, atol=1e-4) for k, v in weights(one).items())
    assert all(torch.equal(ours[k], v) for k, v in weights(two, 1).items())


def test_what_is_only_for_images_says_so(text_run: Path, digits_run: Path, call):
    for words, message in {
        (evaluate, text_run, "--data-root", "."): "--data-root: TextDataModule of this run has no",
        (evaluate, digits_run, "--data-file", "a"): "--data-file: ImageDataModule of this run has",
        (predict, text_run, "seven.png"): "seven.png: TextDataModule takes no files; give",
    }.items():
        code, out, err = call(*words)
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1


def test_a_model_of_text_is_exported(text_run: Path, tmp_path: Path, call):
    run_dir = shutil.copytree(text_run, tmp_path / "text")
    code, out, err = call(export, run_dir)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[1:]][1:] == ["model.pt2"]


def test_another_text_is_refused_with_one_message(text_run: Path, tmp_path: Path, call):
    other = tmp_path / "other.txt"
    other.write_text((ROOT / "docs/contract.md").read_text() + "!")
    code, out, err = call(evaluate, text_run, "--data-file", other)
    assert (code, out) == (2, "")
    message = f"error: data.file={other}: this run has learned {ROOT}/docs/contract.md"
    assert err.startswith(message)
    assert err.count("\n") == 1

    same = tmp_path / "same.txt"
    same.write_text((ROOT / "docs/contract.md").read_text())
    command = ["train.py", *TEXT, f"run_root={tmp_path}", "trainer.max_epochs=1", "report=false"]
    assert run(*command, f"data.file={same}", RUN_ID="mine").returncode == 0
    before = {p: p.read_bytes() for p in (tmp_path / "mine").rglob("*") if p.is_file()}
    more = [*command, "trainer.max_epochs=2"]
    refused = run_ranks(*more, f"data.file={other}", RUN_ID="mine")
    assert refused.returncode == 2
    assert refused.stderr.count("this run has learned") == 1
    assert "Traceback" not in refused.stderr
    after = {p: p.read_bytes() for p in (tmp_path / "mine").rglob("*") if p.is_file()}
    changed = {path.name for path in before if after.get(path) != before[path]}
    assert changed <= {".claim", "rank-0.log"}
    # The same text may be elsewhere.
    done = run(*more, f"data.file={ROOT / 'docs' / 'contract.md'}", RUN_ID="mine")
    assert done.returncode == 0, done.stderr


def test_a_debug_mode_of_images_names_its_file():
    with pytest.raises(ConfigError) as error:
        check(["experiment=language", "debug=overfit"])
    lines = str(error.value).splitlines()
    assert [line.partition(": no such key; ")[0] for line in lines] == [
        "data.shuffle=false", "data.crop_padding=0", "data.flip=false"
    ]  # fmt: skip
    assert all(line.endswith(" (configs/debug/overfit.yaml)") for line in lines)


def test_a_file_of_ones_own_must_be_on_the_cluster():
    assert needed_files(check(["experiment=language"])) == []
    assert needed_files(check(["experiment=language", "data.file=a.txt"])) == ["a.txt"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data=topics"], ["ImageClassifier needs data.num_", "TextDataModule does not have"]),
        (["data=mnist", "model=transformer"], ["LanguageModel needs data.vocabulary_size"]),
        (["experiment=language", "data=digits"], ["needs data.vocabulary_size, data.context"]),
        (["experiment=language", "model=cnn"], ["choose data and a model of one task"]),
    ],
)
def test_parts_of_two_tasks_are_refused_with_one_sentence(overrides: list[str], words: list[str]):
    with pytest.raises(ConfigError) as error:
        check(overrides)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)
