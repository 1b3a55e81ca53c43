"""Runs a style through the columns, each time as a user would, and judges each cell.

identical   Bit-equal weights and metrics. Two ranks are compared with one: the same samples in each
            step, and the same weights up to rounding.
announced   They differ, and the run had said so, and why, before its first step, or before the
            first step with which it continued.
rejected    Exit code 2 and one line before the first step.

The rest must not be: *silent*, where nothing was said, and *failed*, where a run did not finish.
"""

import json
import operator
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from labs.faults.lab import descendants
from labs.foreign.styles.base import Style
from labs.foreign.watcher import FIRST_STEP
from library.tests.programs import PATIENCE_S
from tests.conftest import NO_PICTURES, ROOT, environment, final_metrics
from tests.project.test_train import history

COLUMNS = ("undisturbed", "SIGTERM", "SIGKILL", "2 ranks", "2 ranks, SIGTERM")
GOOD = ("identical", "announced", "rejected")
BASE = [
    "trainer.accelerator=cpu", "trainer.max_epochs=3", "trainer.log_every_n_steps=1",
    "callbacks.checkpoints.monitor=val_loss", "callbacks.checkpoints.mode=min", "report=false",
    NO_PICTURES,
]  # fmt: skip
INTERRUPT = {
    # Within an epoch, and within a step that accumulates three batches.
    signal.SIGTERM: "1 3",
    # After the checkpoint of an epoch's end, which is the last one.
    signal.SIGKILL: "2 1",
}


OTHER_RANKS = "the ranks have other weights"
OTHER_LENGTH = "the batches of a rank have another length"
INEXCUSABLE = (OTHER_RANKS, OTHER_LENGTH)


class Cell(NamedTuple):
    word: str
    why: str = ""


class Attempt(NamedTuple):
    """One program: its exit code, and what it said before its first step and after it."""

    code: int
    before: str
    after: str

    @property
    def is_rejection(self) -> bool:
        has_message = re.search("^error: ", self.before, re.M) is not None
        has_traceback = "Traceback" in self.before
        return self.code == 2 and has_message and not has_traceback and not self.after

    @property
    def last_line(self) -> str:
        """The last error, or the last line where nothing looks like one."""
        lines = (self.before + self.after).strip().splitlines() or [""]
        for line in reversed(lines):
            if re.match(r"(\w+\.)*\w*Error\b|error: ", line):
                break
        else:
            line = lines[-1]
        return f"exit {self.code}: {line[:200]}"


class Matrix:
    """Runs styles in a project of their own, in ``directory``."""

    def __init__(self, directory: Path, timeout_s: float = PATIENCE_S) -> None:
        self.directory = directory
        self.timeout_s = timeout_s
        shutil.copytree(ROOT / "configs", directory / "configs")
        shutil.copy(ROOT / "train.py", directory)
        shutil.copytree(ROOT / "scripts", directory / "scripts")
        (directory / "src").symlink_to(ROOT / "src")

    def run(self, style: Style, columns: Sequence[str] = COLUMNS) -> dict[str, Cell]:
        """The cells of a row."""
        self.write_configs(style)
        cells: dict[str, Cell] = {}
        for column in COLUMNS:
            if column not in columns and column not in needed_by(columns):
                continue
            needed = compared_with(column)
            # Without a run to compare with, the cell would only repeat what stopped that run.
            if cells.get(needed, Cell("")).word in ("rejected", "failed"):
                cells[column] = cells[needed]
            else:
                cells[column] = self.judge(style, column, is_asked=column in columns)
        return {column: cells[column] for column in columns}

    def write_configs(self, style: Style) -> None:
        """The YAML files that a user would write."""
        name = self.id_of(style)
        for group, kind in (("model", style.model), ("data", style.data)):
            if kind is not None:
                node = {"_target_": f"{kind.__module__}.{kind.__qualname__}"}
                (self.directory / f"configs/{group}/{name}.yaml").write_text(yaml.dump(node))

    @staticmethod
    def id_of(style: Style) -> str:
        return re.sub(r"\W+", "-", style.name).strip("-").lower()

    def place(self, style: Style, column: str) -> tuple[Path, Path]:
        """The run directory of a cell, and what its watcher has recorded."""
        run_id = f"{self.id_of(style)[:40]}-{COLUMNS.index(column)}"
        return self.directory / "runs" / run_id, self.directory / "records" / run_id

    def start(self, style: Style, column: str, interrupt: str = "0 -1 -1") -> Attempt:
        """One program, ended when it takes too long."""
        run_dir, records = self.place(style, column)
        node, name = "+callbacks.watcher", self.id_of(style)
        command = [
            sys.executable, "train.py", f"model={name}", f"data={name if style.data else 'null'}",
            *BASE, *style.overrides, f"{node}._target_=labs.foreign.watcher.Watcher",
            f"{node}.dirpath={records}",
        ]  # fmt: skip
        if column.startswith("2 ranks"):
            command.append("trainer.devices=2")
        variables = environment(
            RUN_ID=run_dir.name, INTERRUPT=interrupt, PYTHONPATH=f"{self.directory / 'src'}:{ROOT}"
        )
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(
                command, cwd=self.directory, env=variables, stdin=subprocess.DEVNULL,
                stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(self.timeout_s)
            except subprocess.TimeoutExpired:
                code = 124  # as of timeout(1)
            finally:
                # Read before the program is killed: afterwards its ranks are nobody's children.
                ranks = descendants(process.pid) if process.poll() is None else []
                for pid in [process.pid, *ranks]:
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
            process.wait()
            said.seek(0)
            before, _, after = said.read().partition(FIRST_STEP)
        return Attempt(code, before, after)

    def judge(self, style: Style, column: str, *, is_asked: bool) -> Cell:
        """Run the programs of a cell, and compare what they leave."""
        run_dir, records = self.place(style, column)
        for path in (run_dir, records):
            shutil.rmtree(path, ignore_errors=True)
        attempts = []
        if "SIG" in column:
            signum = signal.Signals[column.split()[-1]]
            attempts.append(self.start(style, column, f"{signum:d} {INTERRUPT[signum]}"))
            if not (records / f"done-{signum:d}").exists():
                return Cell("failed", f"was not interrupted: {attempts[0].last_line}")
            expected = {signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}[signum]
            if attempts[0].code != expected:
                return Cell("failed", f"{signum.name}: {attempts[0].last_line}")
        attempts.append(self.start(style, column))
        if attempts[0].is_rejection:
            return Cell("rejected", attempts[0].last_line)
        if attempts[-1].code != 0:
            return Cell("failed", attempts[-1].last_line)
        differs = self.differences(style, column) if is_asked else ""
        if not differs:
            return Cell("identical")
        return self.announced(style, column, attempts, differs)

    def announced(self, style: Style, column: str, attempts: list[Attempt], why: str) -> Cell:
        """A cell that is not identical: what was said before the first steps?"""
        said = "\n".join(attempt.before for attempt in attempts)
        is_said = why not in INEXCUSABLE and any(
            column in told.columns and re.search(told.pattern, notes_in(said), re.I)
            for told in style.told
        )
        return Cell("announced" if is_said else "silent", why)

    def differences(self, style: Style, column: str) -> str:
        """How a run differs from the one that it is compared with; empty if it does not."""
        run_dir, records = self.place(style, column)
        if differs := differences_of_ranks(records):
            return differs
        if column == "undisturbed":
            return self.evaluate_again(run_dir)
        other_dir, other_records = self.place(style, compared_with(column))
        # Only this column compares other numbers of ranks, whose sums are rounded differently.
        if column == "2 ranks":
            if differs := differences_of_samples(records, other_records):
                return differs
            if style.is_per_rank:
                return ""
            return (
                differences_of_weights(records, other_records, close)
                or differences_of_metrics(run_dir, other_dir, is_near)
            )  # fmt: skip
        if differs := differences_of_weights(records, other_records, torch.equal):
            return differs
        if differs := differences_of_metrics(run_dir, other_dir, operator.eq):
            return differs
        if history(run_dir) != history(other_dir):
            return "other rows in metrics.csv"
        return ""

    def evaluate_again(self, run_dir: Path) -> str:
        """Whether ``samestep evaluate`` finds the metrics of the test, to the last bit."""
        metrics = final_metrics(run_dir)
        tested = [name for name in metrics if name.startswith("test")]
        if not tested:
            return ""
        done = subprocess.run(
            [sys.executable, "-m", "samestep", "evaluate", str(run_dir), "--format=json"],
            cwd=self.directory, env=environment(PYTHONPATH=f"{self.directory / 'src'}:{ROOT}"),
            timeout=self.timeout_s, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            return f"evaluate: {(done.stderr.strip().splitlines() or [''])[-1]}"
        found = json.loads(done.stdout)
        wrong = []
        for name in tested:
            if metrics[name] != found.get(name):
                wrong.append(f"{name} {metrics[name]}, evaluate {found.get(name)}")
        return "; ".join(wrong)


def compared_with(column: str) -> str:
    """The column whose run is the reference of a column."""
    return "2 ranks" if column == "2 ranks, SIGTERM" else "undisturbed"


def needed_by(columns: Sequence[str]) -> set[str]:
    """The columns that must be run for the comparisons of these."""
    return {"undisturbed", *map(compared_with, columns)}


def notes_in(said: str) -> str:
    """The lines that tell the user something, without those of how the run goes."""
    return "\n".join(line for line in said.splitlines() if re.search("note|warn", line, re.I))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal up to the rounding of sums over other parts."""
    return torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)


def is_near(a: float | None, b: float | None) -> bool:
    """``close`` for metrics, of which one may be missing."""
    if a is None or b is None:
        return a is b
    return close(torch.tensor(a), torch.tensor(b))


def differences_of_samples(records: Path, other_records: Path) -> str:
    """Whether two runs saw the same samples in each step."""
    ours, theirs = samples(records), samples(other_records)
    if ours == theirs:
        return ""
    # A DataLoader has a batch for each rank, so a step has as many samples, or twice as many. Any
    # other number means that a batch was cut wrongly, for which a run has no excuse.
    length, expected = len(ours[0, 0]), len(theirs[0, 0])
    return "other samples in a step" if length in (expected, 2 * expected) else OTHER_LENGTH


def differences_of_weights(
    records: Path, other_records: Path, is_equal: Callable[[torch.Tensor, torch.Tensor], bool]
) -> str:
    """Whether two runs end with the same weights."""
    ours, theirs = weights(records), weights(other_records)
    if ours.keys() != theirs.keys():
        return "other weights"
    is_same = all(is_equal(ours[name], theirs[name]) for name in ours)
    return "" if is_same else "other weights"


def differences_of_metrics(
    run_dir: Path, other_dir: Path, is_equal: Callable[[float | None, float | None], bool]
) -> str:
    """The final metrics in which two runs differ."""
    ours, theirs = final_metrics(run_dir), final_metrics(other_dir)
    wrong = []
    for name in ours | theirs:
        value, expected = ours.get(name), theirs.get(name)
        if not is_equal(value, expected):
            wrong.append(f"{name} {value} for {expected}")
    return f"other {', '.join(wrong)}" if wrong else ""


def weights(records: Path) -> dict[str, torch.Tensor]:
    """The final weights, and their names."""
    found: dict[str, torch.Tensor] = torch.load(records / "weights-0.pt")
    return found


def records_of_ranks(records: Path) -> list[list[dict[str, Any]]]:
    paths = sorted(records.glob("rank-*.jsonl"))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def samples(records: Path) -> dict[tuple[int, int], list[str]]:
    """The samples of each step, of all ranks together, in any order."""
    found: dict[tuple[int, int], list[str]] = {}
    for rank in records_of_ranks(records):
        for line in rank:
            if "place" in line:  # the others are of validations and tests
                found.setdefault(tuple(line["place"]), []).extend(line["rows"])
    return {place: sorted(rows) for place, rows in found.items()}


def differences_of_ranks(records: Path) -> str:
    """Whether the ranks end with other weights, or choose by other metrics."""
    paths = sorted(records.glob("weights-*.pt"))
    first, *others = [torch.load(path) for path in paths]
    for other in others:
        if any(not torch.equal(first[key], other[key]) for key in first):
            return OTHER_RANKS
    seen = set()
    for rank in records_of_ranks(records):
        metrics = [line for line in rank if "place" not in line]
        seen.add(str(metrics))  # as text, in which a nan is equal to a nan
    return "the ranks have other metrics" if len(seen) > 1 else ""
