"""Runs of text on several ranks and after a kill, and what their commands say."""

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from examples.language.tests import test_language, test_tokens
from examples.language.tests.conftest import TEXT
from examples.language.tests.test_tokens import data_of, write
from labs.faults.lab import Laboratory
from samestep import evaluate, export, predict
from samestep.errors import ConfigError
from samestep.hydra.compose import check
from tests.conftest import final_metrics, run, run_ranks
from tests.project.test_train import record, recorded
from tests.recorder import name_samples

call, books = test_language.call, test_tokens.books  # fixtures


@pytest.fixture(scope="session")
def text_run(shared_run: Callable[..., Path]) -> Path:
    """Directory of a recorded run on one rank that has learned a small text."""
    return shared_run("text", *TEXT, is_recorded=True)


def weights(folder: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"weights-{rank}.pt")


@pytest.mark.program
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
    assert final_metrics(tmp_path / "mine") == final_metrics(text_run)


@pytest.mark.program
def test_two_ranks_see_the_batches_of_one(text_run: Path, tmp_path: Path):
    two, one = tmp_path / "records", text_run.parent / "records"
    where = f"run_root={tmp_path}"
    done = run_ranks("train.py", *TEXT, *record(two), where, "report=false", RUN_ID="two")
    assert done.returncode == 0, done.stderr
    for stage in ("train", "val", "test"):
        assert recorded(two, stage) == recorded(one, stage)
        assert len(recorded(one, stage)) > 0
    final, expected = final_metrics(tmp_path / "two"), final_metrics(text_run)
    assert final == pytest.approx(expected, abs=1e-4)
    ours = weights(two)
    assert all(torch.allclose(ours[k], v, atol=1e-4) for k, v in weights(one).items())
    assert all(torch.equal(ours[k], v) for k, v in weights(two, 1).items())


@pytest.mark.program
def test_what_is_only_for_images_says_so(text_run: Path, digits_run: Path, call):
    for words, message in {
        (evaluate, text_run, "--data-root", "."): "--data-root: TextDataModule of this run has no",
        (evaluate, digits_run, "--data-file", "a"): "--data-file: Images of this run has",
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


@pytest.mark.program
def test_another_text_is_rejected_with_one_message(tmp_path: Path, call):
    text = "the quick brown fox jumps over the lazy dog\n" * 200
    same, moved, other = (tmp_path / f"{name}.txt" for name in ("same", "moved", "other"))
    same.write_text(text)
    moved.write_text(text)
    other.write_text(text + "!")
    command = ["train.py", *TEXT, f"run_root={tmp_path}", "trainer.max_epochs=1"]
    assert run(*command, f"data.file={same}", RUN_ID="mine").returncode == 0
    before = {p: p.read_bytes() for p in (tmp_path / "mine").rglob("*") if p.is_file()}

    code, out, err = call(evaluate, tmp_path / "mine", "--data-file", other)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: data.file={other}: this run has learned {same}")
    assert err.count("\n") == 1

    more = [*command, "trainer.max_epochs=2"]
    rejected = run_ranks(*more, f"data.file={other}", RUN_ID="mine")
    assert rejected.returncode == 2
    assert rejected.stderr.count("this run has learned") == 1
    assert "Traceback" not in rejected.stderr
    after = {p: p.read_bytes() for p in (tmp_path / "mine").rglob("*") if p.is_file()}
    changed = {path.name for path in before if after.get(path) != before[path]}
    assert changed <= {".claim", "rank-0.log"}
    # The same text may be elsewhere.
    done = run(*more, f"data.file={moved}", RUN_ID="mine")
    assert done.returncode == 0, done.stderr


@pytest.mark.program
def test_a_run_of_tokens_resumes_exactly_and_only_with_its_file(books: Path, tmp_path: Path):
    """Killed alone, continued by two ranks."""
    target = tmp_path / "books.tokens"
    done = run("-m", "examples.language.convert", str(books), str(target))
    command = done.stdout.splitlines()[-1].split()
    assert command[:2] == ["python", "train.py"]
    words = [
        *command[1:], "data.context=16", "data.stride=16", "trainer.max_epochs=2", "report=false",
        "callbacks.samples.length=20", "model.net.width=16", "trainer.accelerator=cpu",
        f"run_root={tmp_path}",
    ]  # fmt: skip
    fault = Laboratory(tmp_path, []).saboteur("mine", ["kill step 60 0"])
    for nodes in ((), (2,)):
        done = run_ranks(*words, *fault, nodes=nodes, RUN_ID="mine")
    assert done.returncode == 0, done.stderr
    assert "bits_per_token" in done.stdout
    sample = (tmp_path / "mine/predictions/sample.txt").read_text("utf-8")
    assert sample.startswith("The ")

    data = data_of(target, context=16, stride=16, global_batch_size=8)
    data.setup("fit")
    loader, found = data.train_dataloader(), {}
    for path in sorted((tmp_path / "records-mine").glob("rank-*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            key = (line["epoch"], line["batch"], line["world_size"])
            found[key] = found.get(key, []) + line["ids"]
    assert {key[2] for key in found} == {1, 2}
    for epoch in (0, 1):
        loader.start_at(epoch, 0)
        for number, batch in enumerate(loader):
            both = [found[k] for n in (1, 2) if (k := (epoch, number, n)) in found]
            assert both
            assert all(ids == name_samples(batch) for ids in both)

    write(books / "more", tmp_path / "other")
    more = [f"data.file={tmp_path / 'other'}", "trainer.max_epochs=3"]
    done = run(*words, *fault, *more, RUN_ID="mine")
    assert done.returncode == 2
    assert re.search(r"this run has learned .*books\.tokens .* and here is .*other", done.stderr)
    assert len(done.stderr.splitlines()) == 1


def test_a_debug_mode_of_images_names_its_file():
    with pytest.raises(ConfigError) as error:
        check(["experiment=language", "debug=overfit"])
    lines = str(error.value).splitlines()
    assert [line.partition(": no such key; ")[0] for line in lines] == [
        "data.shuffle=false", "data.crop_padding=0", "data.flip=false"
    ]  # fmt: skip
    assert all(line.endswith(" (configs/debug/overfit.yaml)") for line in lines)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data=topics"], ["Classifier needs data.mean, ", "TextDataModule does not have"]),
        (["data=mnist", "model=transformer"], ["LanguageModel needs data.vocabulary_size"]),
        (["experiment=language", "data=digits"], ["needs data.vocabulary_size, data.context"]),
        (["experiment=language", "model=cnn"], ["choose data and a model of one task"]),
    ],
)
def test_parts_of_two_tasks_are_rejected_with_one_sentence(overrides: list[str], words: list[str]):
    with pytest.raises(ConfigError) as error:
        check(overrides)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)
