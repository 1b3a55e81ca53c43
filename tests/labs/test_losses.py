"""The tables of losses, what their command judges, and some of the losses on two ranks."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from labs import pages
from labs.losses.__main__ import PAGE, REMEDIES, RESULTS, run_program
from labs.losses.program import ACCUMULATED, CUT, WHOLE, Job, Result, jobs_of, read_results
from labs.losses.shapes import SHAPES
from labs.losses.table import describe, read_table, render, summarize
from labs.losses.verdict import RUNS, Verdict, is_good, judge
from samestep.run_spec import KNOWN_DIFFERENCES

TEXT = PAGE.read_text()
TABLE = read_table(RESULTS.read_text())
NOTE = "Note: the loss is not a mean over the samples ...; allow=[loss] accepts it\n"


def test_the_table_has_every_loss_and_none_is_silent():
    assert sorted(TABLE) == sorted(shape.name for shape in SHAPES)
    assert len(TABLE) >= 36
    kinds = "|".join(KNOWN_DIFFERENCES)
    for shape in SHAPES:
        written, *others = TABLE[shape.name]
        assert re.match(rf"exact$|announced: ({kinds})", written), shape.name
        if not others:
            continue
        remedy, whole, accumulated, cut = others
        assert remedy == (shape.remedy or "-")
        if shape.remedy:
            assert whole == "exact"
            assert accumulated in ("exact", "-")
        assert cut.partition(":")[0] in ("exact", "announced", "silent", "-")


def test_the_page_says_which_function_helps_which_loss():
    assert pages.read_table(TEXT, REMEDIES) == summarize(SHAPES)


def test_names_can_be_found():
    names = [shape.name for shape in SHAPES]
    assert len(set(names)) == len(names)
    # They separate names and cells of the table.
    assert not [name for name in names if ";" in name or "|" in name]


def result(weight: float, logged: float = 1.0, said: str = "") -> Result:
    weights = {"weight": torch.tensor([weight], dtype=torch.float64)}
    return Result(weights, {"train_loss": torch.tensor(logged, dtype=torch.float64)}, said)


@pytest.mark.parametrize(
    ("ours", "word"),
    [
        (result(2.0), "exact"),
        (result(2.0 + 1e-13), "exact"),
        (result(2.001), "silent"),
        (result(2.0, logged=1.001), "silent"),
        (result(2.0, logged=float("nan")), "silent"),
        (result(2.001, said=NOTE), "announced"),
        (result(2.001, said="Note: something else\n"), "silent"),
        (result(2.0, said=NOTE), "noise"),
        (None, "failed"),
    ],
)
def test_a_run_is_compared_with_one_rank(ours: Result | None, word: str):
    results = {(WHOLE, 1): result(2.0)}
    if ours is not None:
        results[WHOLE, 2] = ours
    verdict = judge(results, WHOLE, 2)
    assert verdict.word == word
    assert is_good(verdict, WHOLE, is_mended=False) == (word in ("exact", "announced"))


def test_a_batch_that_is_cut_makes_the_step_of_the_whole_one():
    results = {(WHOLE, 1): result(2.0), (CUT, 1): result(2.1, 3.0), (CUT, 3): result(2.0, 3.0)}
    assert judge(results, CUT, 3).word == "exact"
    assert judge(results, CUT, 1).word == "silent"
    # Unless it draws random numbers.
    results[CUT, 3] = result(2.1, 3.0)
    assert judge(results, CUT, 3).word == "silent"
    assert judge(results, CUT, 3, draws=True).word == "exact"


@pytest.mark.parametrize("verdict", [Verdict("announced", 0.1, ("loss",)), Verdict("silent", 0.1)])
def test_only_the_cut_may_be_too_much_for_a_remedy(verdict: Verdict):
    assert is_good(verdict, CUT, is_mended=True)
    assert not is_good(verdict, WHOLE, is_mended=True)


def test_the_table_can_be_read_as_it_is_written():
    written, mended = Verdict("announced", 0.02, ("loss",)), Verdict("exact")
    first, second = (shape for shape in SHAPES if shape.name in ("cross entropy", "class weights"))
    verdicts = {
        Job(first, False): dict.fromkeys(RUNS, mended),
        Job(second, False): dict.fromkeys(RUNS, written),
        Job(second, True): dict.fromkeys(RUNS, mended) | {(CUT, 3): written},
    }
    page = f"before <!-- table -->\n{render(verdicts)}<!-- end -->"
    cells = ["announced: loss", "`samestep.mean`", "exact", "exact", "announced: loss"]
    assert read_table(page) == {"cross entropy": ["exact"], "class weights": cells}


def test_losses_on_two_ranks_are_what_the_table_says(tmp_path: Path):
    shapes = [shape for shape in SHAPES if shape.name in ("class weights", "CLIP")]
    for num_ranks in (1, 2):
        run_program(tmp_path, shapes, num_ranks)
    for job in jobs_of(shapes):
        results = read_results(tmp_path, job)
        for mode in (WHOLE, ACCUMULATED):
            verdict = judge(results, mode, 2)
            column = 2 if job.is_mended else 0
            assert describe(verdict) == TABLE[job.shape.name][column], (job.name, verdict)


def test_a_loss_that_fails_does_not_hide(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    run_program(tmp_path / "missing", SHAPES[:1], 1)
    assert f"{SHAPES[0].name} has failed" in capfd.readouterr().out


def test_examples_of_the_page_are_the_losses_that_they_replace():
    functions = {"torch": torch}
    for block in re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S):
        exec(block, functions)
    logits, weights = torch.randn(8, 3), torch.tensor([1.0, 5.0, 0.2])
    targets = torch.tensor([0, 1, 2, -100, 0, 1, 2, -100])
    found = functions["tokens"](logits[None], targets[None])
    torch.testing.assert_close(found, F.cross_entropy(logits, targets))
    targets = targets.clamp(min=0)
    found = functions["class_weights"](logits, targets, weights)
    torch.testing.assert_close(found, F.cross_entropy(logits, targets, weights))
    images, texts = F.normalize(logits), F.normalize(logits + 0.1)
    expected = F.cross_entropy(5 * images @ texts.T, torch.arange(8))
    expected = (expected + F.cross_entropy(5 * texts @ images.T, torch.arange(8))) / 2
    torch.testing.assert_close(functions["clip"](images, texts, 5), expected)
