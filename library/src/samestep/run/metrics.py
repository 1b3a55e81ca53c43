"""Reads the metrics of a run from ``metrics.csv`` and ``metrics.json``. Imports no torch."""

import csv
import io
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.run.files import read_json, read_text

# Columns about progress, machine and speed, which say nothing about what was learned.
NO_RESULT = re.compile(
    r"epoch|step|(step|system|time)/.*|lr([-/].*)?|.*_per_second|DeviceStatsMonitor.*"
)

Rows = list[dict[str, float]]


def read_final_metrics(run_dir: Path) -> dict[str, Any] | None:
    """The final metrics of a run; None if the file is absent or damaged.

    A metric that was not finite is None.
    """
    return read_json(run_dir / "metrics.json")


def read_history(run_dir: Path) -> Rows:
    """The rows of ``metrics.csv`` in order of their steps, each without its empty columns.

    An absent or damaged file has no rows; ``why_damaged`` tells which it is.
    """
    rows, _ = _read_table(run_dir / "metrics.csv")
    return rows


def why_damaged(run_dir: Path) -> str | None:
    """Why ``metrics.csv`` cannot be read; None if it can be, or if there is none."""
    _, why = _read_table(run_dir / "metrics.csv")
    return why


def is_result(name: str) -> bool:
    """Whether a column of ``metrics.csv`` is about what was learned: no step, rate or speed."""
    return not NO_RESULT.fullmatch(name)


def is_of_test(name: str) -> bool:
    """Whether a metric is one of the test: ``test/loss``, ``test_loss`` or ``loss/test``."""
    return re.fullmatch(r"test[/_].+|.+[/_]test", name) is not None


def _read_table(path: Path) -> tuple[Rows, str | None]:
    """The rows of a table, and why it cannot be read if it cannot."""
    try:
        return _parse(read_text(path)), None
    except FileNotFoundError:
        return [], None
    except (OSError, ValueError, csv.Error) as error:
        return [], str(error)


def _parse(text: str) -> Rows:
    table = csv.DictReader(io.StringIO(text, newline=""))
    if table.fieldnames is None or list(table.fieldnames[:2]) != ["epoch", "step"]:
        raise ValueError("it has no columns epoch and step")
    rows = []
    for row in table:
        # None is the name of values beyond the last column, such as those of two lines in one.
        if None in row or not row["step"]:
            raise ValueError(f"line {table.line_num} is damaged")
        rows.append({name: float(value) for name, value in row.items() if value})
    return rows


def count_epochs(rows: Rows) -> int:
    """How many epochs the run was trained."""
    return _count("epoch", rows)


def count_steps(rows: Rows) -> int:
    """How many optimizer steps the run was trained."""
    return _count("step", rows)


def _count(column: str, rows: Rows) -> int:
    # Both columns count from 0.
    numbers = [row.get(column, -1) for row in trained_rows(rows)]
    return int(max(numbers, default=-1)) + 1


def trained_rows(rows: Rows) -> Rows:
    """The rows that were written while training, not by a validation or a test."""
    return [row for row in rows if _is_trained(row)]


def _is_trained(row: Mapping[str, float]) -> bool:
    # A module may name its metrics without `train/`. `time/epoch_s` is ours, once per epoch.
    return any(name.startswith(("train/", "time/")) for name in row)


def speeds(rows: Rows) -> dict[str, float]:
    """The median of each ``train/<things>_per_second``, as ``{"<things>/s": 5000.0}``."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            found = re.fullmatch(r"train/(.+)_per_second", name)
            if found:
                values.setdefault(f"{found[1]}/s", []).append(value)
    # The median: the first epoch compiles, opens files and fills caches.
    return {name: statistics.median(values[name]) for name in sorted(values)}
