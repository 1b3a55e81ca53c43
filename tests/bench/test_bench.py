"""The harness of ``make bench``: its gate, its numbers, and one tiny row from end to end."""

import json
from pathlib import Path

import pytest
import torch

from tests.bench import epochs, measure, sets
from tests.bench.__main__ import bench, note
from tests.bench.measure import Measured, Row
from tests.bench.rows import all_rows
from tests.conftest import environment

CLAIM = "ours / bare <= 2"


def test_ours_learns_what_the_bare_loop_learns_and_another_recipe_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    # Without PYTHONWARNINGS, so that the contenders start from the fork server.
    monkeypatch.setattr(measure, "environment", lambda at: environment(BENCH_STARTED=repr(at)))
    names = ["bare", "ours", "wrong"]
    row = Row(
        "tiny", "tiny set",
        {name: ["-m", "tests.bench.contender", "epochs", name, "tiny", str(tmp_path)]
         for name in names},
        [CLAIM], prepare=lambda: sets.write_tensors("tiny", tmp_path), same_curve=tuple(names),
    )  # fmt: skip
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table -->\n<!-- end -->\nafter\n")
    code = bench([row], 1, page, tmp_path / "bench.json", order=[row.title])
    assert code == 1
    assert "error: tiny: wrong has another loss curve than bare" in capsys.readouterr().err
    table = page.read_text()
    assert "| tiny set | ours / bare <= 2 | does not count: other losses | 1" in table
    assert "| **no** |" in table
    found = json.loads((tmp_path / "bench.json").read_text())["tiny"]
    assert found["torch"] == torch.__version__.partition("+")[0]
    assert 0 <= found["busy"] <= 1
    assert found["numbers"][0].keys() == set(names)
    assert all(found["peak_mib"][name] > 100 for name in names)


RESULTS = {"bare": {"curve": [2.3, 2.2]}, "ours": {"curve": [2.3, 2.2]}}


@pytest.mark.parametrize("curve", [[2.3, 2.21], [2.3], [2.3, float("nan")], []])
def test_the_gate_wants_the_same_losses(curve: list[float]):
    row = Row("a", "a", {}, [], same_curve=("bare", "ours"))
    assert measure.gate(row, RESULTS) == ""
    assert "ours has another" in measure.gate(row, {**RESULTS, "ours": {"curve": curve}})


def test_a_line_says_the_median_of_the_pairs_and_whether_the_promise_holds():
    pairs = [(1.0, 1.5), (2.0, 3.0), (1.0, 9.0), (1.0, 1.6), (1.0, 1.4)]
    measured = Measured([{"bare": bare, "ours": ours} for bare, ours in pairs], busy=0.5)
    row = Row("a", "A", {}, [CLAIM, "ours - bare <= 0.5", "ours >= 1", "bare"], "s")
    lines = measure.lines_of(row, measured)
    assert lines[0] == ["A", CLAIM, "1.5 (1.4 to 9)", "5 (busy: 50%)", "yes", ""]
    assert lines[1][1:3] == ["ours - bare <= 0.5 s", "0.6 s (0.4 to 8)"]
    assert [line[4] for line in lines] == ["yes", "**no**", "yes", ""]


def test_a_new_result_replaces_the_old_line_and_keeps_the_others(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("<!-- table -->\n<!-- end -->\n")
    for workload, peak in (("B", "1"), ("A", "2"), ("B", "3")):
        note(page, ["A", "B"], [[workload, "x", "x", "x", "x", peak]])
    assert page.read_text().splitlines()[3:5] == [
        "| A | x | x | x | x | 2 |", "| B | x | x | x | x | 3 |"
    ]  # fmt: skip


def test_the_table_of_the_page_has_the_rows_that_there_are():
    page = (measure.ROOT / "docs/performance.md").read_text()
    table = page.partition("<!-- table -->\n")[2].partition("<!-- end -->")[0]
    found = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    titles = [row.title for row in all_rows(Path())]
    assert list(dict.fromkeys(found)) == titles


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_step_never_waits_for_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torch raises in the step that reads something from the device."""
    sets.write_tensors("gpu-guide", tmp_path)
    monkeypatch.setitem(epochs.EPOCHS, "gpu-guide", 1)
    make_timer = epochs.make_timer

    def make_strict_timer() -> object:
        timer = make_timer()
        count = timer.on_train_batch_end

        def on_train_batch_end(trainer: object, module: object, outputs: object, *_: object):
            step = trainer.global_step
            if step < sets.CURVE:
                count(trainer, module, outputs)
            # The guard looks at its flags every 50 steps, and the progress every 10 seconds.
            torch.cuda.set_sync_debug_mode("error" if 25 <= step < 45 else "default")

        timer.on_train_batch_end = on_train_batch_end
        return timer

    monkeypatch.setattr(epochs, "make_timer", make_strict_timer)
    try:
        epochs.ours("gpu-guide", str(tmp_path))
    finally:
        torch.cuda.set_sync_debug_mode("default")
