"""The metrics of a run, as its files ``metrics.csv`` and ``metrics.json`` hold them. No torch."""

import csv
import io
import json
import re
import statistics
from pathlib import Path
from typing import Any

from samestep.run.files import read_text

NO_RESULT = re.compile(
    r"epoch|step|(step|system|time)/.*|lr([-/].*)?|.*_per_second|DeviceStatsMonitor.*"
)

Rows = list[dict[str, float]]


def read_final_metrics(run_dir: Path) -> dict[str, Any] | None:
    """The final metrics, null where one is no number; None if the file is absent or damaged."""
    try:
        figures = json.loads(read_text(run_dir / "metrics.json"))
    except (OSError, ValueError):
        return None
    return figures if isinstance(figures, dict) else None


def read_history(run_dir: Path) -> list[dict[str, float]]:
    """The rows of ``metrics.csv`` in order of their step, each without its empty columns.

    There are none if the file is absent or damaged; ``why_damaged`` tells which.
    """
    try:
        return _read_rows(run_dir / "metrics.csv")
    except (OSError, ValueError, csv.Error):
        return []


def why_damaged(run_dir: Path) -> str | None:
    """Why ``metrics.csv`` cannot be read; None if it can, or is absent."""
    path = run_dir / "metrics.csv"
    try:
        _read_rows(path)
    except (OSError, ValueError, csv.Error) as error:
        return str(error) if path.exists() else None
    return None


def is_result(name: str) -> bool:
    """Whether a column of ``metrics.csv`` says what a run has learned: no step, rate or speed."""
    return not NO_RESULT.fullmatch(name)


def is_of_test(name: str) -> bool:
    """Whether a metric is of the test, as ``test/loss``, ``test_loss``, ``loss/test``."""
    return re.fullmatch(r"test[/_].+|.+[/_]test", name) is not None


def _read_rows(path: Path) -> list[dict[str, float]]:
    table = csv.DictReader(io.StringIO(read_text(path), newline=""))
    if table.fieldnames is None or list(table.fieldnames[:2]) != ["epoch", "step"]:
        raise ValueError("it has no columns epoch and step")
    rows = []
    for row in table:
        if None in row or not row["step"]:
            raise ValueError(f"line {table.line_num} is damaged")
        rows.append({name: float(value) for name, value in row.items() if value})
    return rows


def count_epochs(rows: Rows) -> int:
    """How many epochs the run was trained."""
    return int(max((row.get("epoch", -1) for row in trained_rows(rows)), default=-1)) + 1


def count_steps(rows: Rows) -> int:
    """How many optimizer steps the run was trained."""
    return int(max((row["step"] for row in trained_rows(rows)), default=-1)) + 1


def trained_rows(rows: Rows) -> Rows:
    """The rows that were written while training, not by a validation or a test."""
    # A module may name its metrics as it likes; `time/epoch_s` is that of each epoch.
    own = ("train/", "time/")
    return [row for row in rows if any(name.startswith(own) for name in row)]


def speeds(rows: Rows) -> dict[str, float]:
    """The median of each ``train/<things>_per_second``, as ``{"<things>/s": 5000.0}``."""
    prefix, suffix = "train/", "_per_second"
    names = {name for row in rows for name in row}
    return {
        f"{name.removeprefix(prefix).removesuffix(suffix)}/s": (
            statistics.median(row[name] for row in rows if name in row)
        )
        for name in sorted(names)
        if name.startswith(prefix) and name.endswith(suffix)
    }
