"""Whole runs of text: the promises of every run, kept by a task that has no images."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from samestep import command_line, evaluate, load_run
from tests.conftest import final_metrics


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a script on a command line, and returns its exit code, stdout and stderr."""

    def call(script, *words: object) -> tuple[int, str, str]:
        code = command_line.call(lambda: script.main(list(map(str, words))))
        return code, *capsys.readouterr()

    return call


@pytest.mark.program
def test_a_run_learns_and_leaves_text(text_run: Path):
    final = final_metrics(text_run)
    for stage in ("train", "val", "test"):
        bits = final[f"{stage}/bits_per_character"]
        assert bits == pytest.approx(final[f"{stage}/loss"] / 0.693147, rel=1e-4)
        assert 2 < bits < 6.5, "guessing among 90 characters takes 6.5 bits"
    sample = (text_run / "predictions/sample.txt").read_text("utf-8")
    assert sample.startswith("The ")
    assert len(sample) == len("The ") + 20 + 1
    assert [path.name for path in (text_run / "predictions").iterdir()] == ["sample.txt"]
    said = (text_run.parent / "stdout.txt").read_text()
    assert "windows/s" in said
    assert "test/bits_per_character" in said


def test_evaluate_gives_the_metrics_of_the_run(text_run: Path, call):
    for split, ckpt in {"test": "best", "val": "last"}.items():
        words = [text_run, "--split", split, "--ckpt", ckpt, "--accelerator", "cpu"]
        code, out, err = call(evaluate, *words, "--format", "json")
        assert (code, err) == (0, "")
        expected = {k: v for k, v in final_metrics(text_run).items() if k.startswith(f"{split}/")}
        assert json.loads(out) == expected


def test_a_prompt_is_continued_by_what_the_model_has_learned(text_run: Path):
    model, data = load_run(text_run)
    vocabulary = data.vocabulary
    sample = (text_run / "predictions/sample.txt").read_text("utf-8")
    assert f"The {model.write('The ', vocabulary, 20, 0.8, 0)}\n" == sample
    # Longer than the context, and with characters that the vocabulary does not have.
    assert len(model.write("\N{SNOWMAN}" * 50, vocabulary, 20, 0.8, 0)) == 20
    assert set(model.write("a", vocabulary, 200, 100.0, 0)) <= set(vocabulary.characters)
    # Near 0 the most likely character is drawn.
    ids = vocabulary.encode("The cat")
    best = int(model(ids[None])[0, -1, 1 : len(vocabulary)].argmax()) + 1
    assert model.write("The cat", vocabulary, 1, 1e-6, 0) == vocabulary.decode([best])
