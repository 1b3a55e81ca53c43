"""Curves of metrics, as data that ``charts.js`` draws with Plotly and also shows as tables."""

import base64
import gzip
import itertools
import math
import re
from collections.abc import Sequence
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple

from samestep.report.files import Run
from samestep.run.metrics import Rows, is_of_test, is_result

MAX_POINTS = 1000  # of a curve; a screen has no more columns of pixels
PRECISION = 6  # significant places of a point


class Chart(NamedTuple):
    """Curves over the same axis."""

    title: str
    axis: str  # what the axis counts, from 1: epoch or step
    curves: list[dict[str, Any]]  # of each: name, position of the best epoch, and the points

    @property
    def is_about_machine(self) -> bool:
        """Whether it shows speed, time or memory, which are not about what was learned."""
        return bool(re.match("time/|system/|.*_per_second", self.title))


class Column(NamedTuple):
    """A metric of one run."""

    run: Run
    name: str
    curve: str  # the name of its curve
    rows: Rows  # the rows of the run in which the metric is finite

    @property
    def has_one_value_per_epoch(self) -> bool:
        """Whether the epoch alone tells the values apart."""
        epochs = {row["epoch"] for row in self.rows if "epoch" in row}
        return len(epochs) == len(self.rows)


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """The columns of ``metrics.csv`` as charts, results first and the machine last.

    For one run, metrics of the same name share a chart, such as ``train/loss`` and ``val/loss``.
    For several runs, each metric has a chart with a curve per run. Final metrics of the test and
    values that are not finite are left out.
    """
    columns = columns_by_title(runs)
    remove_repeated_lr(columns)
    charts = []
    for title, of_title in columns.items():
        charts.append(make_chart(title, of_title))
    return sorted(charts, key=lambda chart: position_of(chart, columns[chart.title]))


def columns_by_title(runs: Sequence[Run]) -> dict[str, list[Column]]:
    """The columns that are drawn, by the title of their chart."""
    columns: dict[str, list[Column]] = {}
    for run in runs:
        for name in names_of(run):
            rows = [row for row in run.rows if math.isfinite(row.get(name, math.nan))]
            if not rows:
                continue
            # With several runs, a chart of both train/loss and val/loss would mix two questions:
            # which run is better, and whether it overfits. The title names the metric there.
            title, curve = name, run.name
            if len(runs) == 1:
                title, curve = title_of(name), name
            columns.setdefault(title, []).append(Column(run, name, curve, rows))
    return columns


def names_of(run: Run) -> list[str]:
    """The metrics of a run that have a curve, sorted."""
    names: set[str] = set()
    for row in run.rows:
        names.update(row)
    names -= {"epoch", "step"}
    # The test comes once, at the end.
    return sorted(itertools.filterfalse(is_of_test, names))


def remove_repeated_lr(columns: dict[str, list[Column]]) -> None:
    """Remove ``lr`` or ``step/lr``, the one with fewer points: both show the learning rate."""
    num_points = {"lr": 0, "step/lr": 0}
    for title in num_points:
        for column in columns.get(title, []):
            num_points[title] += len(column.rows)
    # A run shorter than log_every_n_steps has no step/lr at all, so neither name always wins.
    columns.pop(min(num_points, key=num_points.__getitem__), None)


def position_of(chart: Chart, columns: Sequence[Column]) -> tuple[bool, bool, int, str]:
    """The sort key of a chart: what a reader looks for first has the smallest."""
    has_results = is_result(columns[0].name)
    # A chart of several curves, such as loss of train and val, says more than one of a single.
    return chart.is_about_machine, not has_results, -len(chart.curves), chart.title


def make_chart(title: str, columns: Sequence[Column]) -> Chart:
    """A chart over the epochs, or over the steps if an epoch has several values."""
    # One axis for all curves: a chart cannot have epochs for one of them and steps for another.
    is_over_epochs = all(column.has_one_value_per_epoch for column in columns)
    axis = "epoch" if is_over_epochs else "step"
    return Chart(title, axis, [make_curve(column, axis) for column in columns])


def make_curve(column: Column, axis: str) -> dict[str, Any]:
    """The name of a curve, its points, and where the best epoch lies on the axis."""
    # The last row of an epoch wins: over steps, the star stands where the epoch ends.
    ends: dict[float | None, int] = {}
    for row in column.rows:
        if "epoch" in row:
            ends[row["epoch"] + 1] = int(row[axis]) + 1
    best = None
    # A star on the learning rate or the speed would suggest that these were best there.
    if is_result(column.name):
        best = ends.get(column.run.status.best_epoch)
    shown = thin_out(column.rows)
    # metrics.csv counts epochs and steps from 0, the page from 1.
    x = [int(row[axis]) + 1 for row in shown]
    # Places that a screen cannot show would only make the page larger.
    y = [float(f"{row[column.name]:.{PRECISION}g}") for row in shown]
    return {"name": column.curve, "best": best, "x": x, "y": y}


def thin_out(rows: Rows) -> Rows:
    """At most ``MAX_POINTS`` rows at even distances, the last row included."""
    distance = math.ceil(len(rows) / MAX_POINTS)
    # Counted from the end: the newest value must be among them, the first need not.
    from_last = rows[::-distance]
    return from_last[::-1]


def title_of(name: str) -> str:
    """The chart of a metric: ``loss`` for ``train/loss_step``, ``val_loss`` and ``loss/val``."""
    return re.sub(r"^(train|val)[/_]|[/_](train|val)$|_(step|epoch)$", "", name)


@cache
def plotly_gz() -> bytes:
    """Plotly's script from the installed package, compressed."""
    # Importing plotly takes half a second, and only one file of it is needed.
    path = Path(str(distribution("plotly").locate_file("plotly/package_data/plotly.min.js")))
    # Level 4 takes 0.1 s; level 9 takes 0.24 s for 4 % less.
    return gzip.compress(path.read_bytes(), 4, mtime=0)


def plotly_text() -> str:
    """The same as text that a page can contain and unpack: a third of the script's size."""
    return base64.b64encode(plotly_gz()).decode()
