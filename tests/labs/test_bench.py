"""The harness of ``labs.bench``: its gate, its numbers, and one tiny row from end to end."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from labs.bench import epochs, measure
from labs.bench.__main__ import bench, note
from labs.bench.callbacks import CURVE, Timer
from labs.bench.measure import Row
from labs.bench.rows import EPOCHS, all_rows
from library.tests.programs import until
from tests.conftest import environment

CLAIM = "ours / bare <= 2"


def test_ours_learns_what_the_bare_loop_learns_and_another_recipe_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    # Without PYTHONWARNINGS, so that the contenders start from the fork server.
    monkeypatch.setattr(
        measure, "environment", lambda at, tree: environment(BENCH_STARTED=repr(at))
    )
    contenders = {
        "bare": f"{EPOCHS}:bare tiny",
        "ours": f"{EPOCHS}:ours tiny",
        "wrong": f"{EPOCHS}:bare tiny data.seed=2",  # another order of the images
    }
    row = Row("tiny", "tiny set", contenders, [CLAIM])
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table -->\n<!-- end -->\nafter\n")
    code = bench([row], 1, page, tmp_path / "bench.json", order=[row.title])
    assert code == 1
    assert "error: tiny: wrong has another loss curve than bare" in capsys.readouterr().err
    table = page.read_text()
    assert "| tiny set | ours / bare <= 2 | does not count: other losses | 1" in table
    assert "| **no** |" in table
    found = json.loads((tmp_path / "bench.json").read_text())["tiny"]
    assert found["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert 0 <= found["busy"] <= 1
    assert found["numbers"][0].keys() == set(contenders)
    assert all(found["peak_mib"][name] > 100 for name in contenders)


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that a contender makes when it hangs; then the time that it may take is over.

    So is the time for its stacks when they are written.
    """
    path = tmp_path / "begun"

    class Contender(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **options: Any) -> None:
            self.output = options["stderr"].fileno()
            super().__init__(command, **options)

        def has_stacks(self) -> bool:
            text = os.pread(self.output, 1_000_000, 0)
            return b"in wait_for_nothing" in text and b"_shutdown" in text

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            is_over = path.exists if timeout == measure.MOST_S else self.has_stacks
            until(lambda: is_over() or self.poll() is not None)
            if self.returncode is None:
                raise subprocess.TimeoutExpired(self.args, timeout)
            return self.returncode

    monkeypatch.setattr(measure.subprocess, "Popen", Contender)
    return path


def test_a_row_ends_although_a_contender_hangs_or_leaves_a_process_behind(
    tmp_path: Path, begun: Path
):
    script = tmp_path / "leaves.py"
    script.write_text(
        "import pathlib, signal, subprocess, sys, time\n"
        # A shell that starts the tests in the background lets them ignore it.
        "signal.signal(signal.SIGQUIT, signal.SIG_DFL)\n"
        "subprocess.Popen(['sleep', '300'])\n"  # which has its output, as a loader's process has
        "print('RESULT {\"value\": 7}', flush=True)\n"
        "if sys.argv[1:]:\n"
        f"    pathlib.Path({str(begun)!r}).touch()\n"
        "    time.sleep(1000)\n"
    )
    assert measure.run(f"{script}") == {"value": 7}
    script.write_text(script.read_text().replace("RESULT", ""))
    with pytest.raises(RuntimeError, match=r"leaves\.py hang ended with nothing after 600 s"):
        measure.run(f"{script} hang")


@pytest.mark.parametrize("has_result", [True, False])
def test_a_contender_that_hangs_says_where(
    tmp_path: Path, begun: Path, capsys: pytest.CaptureFixture[str], has_result: bool
):
    """Also one whose watchdog has stopped the countdown, and that hangs at its end."""
    script = tmp_path / "hangs.py"
    result = "print('RESULT {\"value\": 7}', flush=True)\n" if has_result else ""
    script.write_text(
        "import faulthandler, pathlib, sys, threading, time\n"
        "from labs.bench.contender import show_stacks_when_asked\n"
        "show_stacks_when_asked()\n"
        "faulthandler.cancel_dump_traceback_later()\n"
        f"{result}"
        "def wait_for_nothing():\n"
        "    while threading.main_thread().is_alive(): time.sleep(0.01)\n"
        f"    pathlib.Path({str(begun)!r}).touch()\n"
        "    time.sleep(1000)\n"
        "threading.Thread(target=wait_for_nothing).start()\n"
    )
    if has_result:
        assert measure.run(str(script)) == {"value": 7}
        said = capsys.readouterr().err
    else:
        with pytest.raises(RuntimeError, match="nothing after 600 s") as raised:
            measure.run(str(script))
        said = str(raised.value)
    assert "in wait_for_nothing" in said
    assert "_shutdown" in said


RESULTS = {
    "bare": {"curve": [2.3, 2.2]}, "ours": {"curve": [2.3, 2.2]}, "textbook": {"value": 1.0},
}  # fmt: skip


def test_the_gate_wants_the_same_losses_and_a_curve_to_compare_with():
    assert measure.gate(RESULTS) == ""
    for curve in ([2.3, 2.21], [2.3], [2.3, float("nan")], []):
        assert "ours has another" in measure.gate({**RESULTS, "ours": {"curve": curve}})
    without = {**RESULTS, "ours": {"value": 1.0}}
    assert measure.gate(without) == "bare has a loss curve, and no other contender has one"


def test_a_line_says_the_median_of_the_pairs_and_whether_the_promise_holds():
    pairs = [(1.0, 1.5), (2.0, 3.0), (1.0, 9.0), (1.0, 1.6), (1.0, 1.4)]
    numbers = [{"bare": bare, "ours": ours} for bare, ours in pairs]
    measured = {"numbers": numbers, "peak_mib": {}, "busy": 0.5, "wrong": ""}
    row = Row("a", "A", {}, [CLAIM, "ours - bare <= 0.5", "ours >= 1", "bare"], "s")
    lines = measure.lines_of(row, measured)
    assert lines[0] == ["A", CLAIM, "1.5 (1.4 to 9)", "5 (busy: 50%)", "yes", ""]
    assert lines[1][1:3] == ["ours - bare <= 0.5 s", "0.6 s (0.4 to 8)"]
    assert [line[4] for line in lines] == ["yes", "**no**", "yes", ""]


def test_a_new_result_replaces_the_old_line_and_keeps_the_others(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("<!-- table -->\n<!-- end -->\n")
    for workload, peak in (("B", "1"), ("A", "2"), ("B", "3")):
        line = [workload, "x", "x", "x", "x", peak]
        note(page, ["A", "B"], [line, line])
    assert page.read_text().splitlines()[3:7] == [
        "| A | x | x | x | x | 2 |", "|  | x | x | x | x |  |",
        "| B | x | x | x | x | 3 |", "|  | x | x | x | x |  |",
    ]  # fmt: skip


def test_a_row_that_cannot_be_measured_says_why(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("<!-- table -->\n<!-- end -->\n")
    row = Row("far", "far", {"ours": "no.py"}, ["ours <= 1"], lacks="skipped: no server built")
    assert bench([row], 1, page, tmp_path / "bench.json", order=["far"]) == 0
    assert "| far | ours <= 1 | skipped: no server built |  |  |  |" in page.read_text()


def test_the_table_of_the_page_has_the_rows_that_there_are():
    page = (measure.ROOT / "labs/bench/results.md").read_text()
    table = page.partition("<!-- table -->\n")[2].partition("<!-- end -->")[0]
    found = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    titles = [row.title for row in all_rows(Path())]
    assert [title for title in found if title] == titles


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_step_never_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch):
    """torch raises in the step that reads something from the device."""

    class StrictTimer(Timer):
        def on_train_batch_end(self, trainer: L.Trainer, *arguments: object) -> None:
            step = trainer.global_step
            if step < CURVE:
                super().on_train_batch_end(trainer, *arguments)
            # The guard looks at its flags every 50 steps, and the progress every 10 seconds.
            torch.cuda.set_sync_debug_mode("error" if 25 <= step < 45 else "default")

    monkeypatch.setattr(epochs, "Timer", StrictTimer)
    try:
        epochs.train_ours("gpu-guide", "trainer.max_epochs=1")
    finally:
        torch.cuda.set_sync_debug_mode("default")
