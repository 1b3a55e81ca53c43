"""Curves of metrics, as data that ``charts.js`` draws with Plotly and also shows as tables."""

import base64
import gzip
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple

from samestep.report.files import Run
from samestep.run.metrics import Rows, is_of_test, is_result

MAX_POINTS = 1000  # of a curve; a screen has no more columns of pixels
PRECISION = 6  # significant places of a point


TIME = "time/epoch_s"


class Chart(NamedTuple):
    """Curves over the same axis."""

    title: str
    axis: str  # what the axis counts, from 1, unless a reader chooses another: epoch or step
    curves: list[dict[str, Any]]  # see ``make_curve``
    ends: list[dict[str, list[float]]]  # where the epochs of each run end, see ``ends_of``

    @property
    def is_about_machine(self) -> bool:
        """Whether it shows speed, time or memory, which are not about what was learned."""
        return bool(re.match("time/|system/|.*_per_second", self.title))


class Column(NamedTuple):
    """A metric of one run."""

    run: Run
    name: str
    curve: str  # the name of its curve
    mean: str  # the name of the curve of its means, if it has one value per step; otherwise empty
    rows: Rows  # the rows of the run in which the metric is finite

    @property
    def is_over_epochs(self) -> bool:
        """Whether the epoch alone tells the values apart, or a mean per epoch stands for them."""
        epochs = {row["epoch"] for row in self.rows if "epoch" in row}
        # A short run may have one step/loss in each epoch, which is no value of the epoch.
        is_of_steps = self.name.startswith("step/")
        return bool(self.mean) or (len(epochs) == len(self.rows) and not is_of_steps)


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """The columns of ``metrics.csv`` as charts, results first and the machine last.

    For one run, metrics of the same name share a chart, such as ``train/loss`` and ``val/loss``,
    and values of single steps are behind the mean of their epoch. For several runs, each metric has
    a chart with a curve per run. Final metrics of the test and values that are not finite are left
    out.
    """
    columns = columns_by_title(runs)
    remove_repeated_lr(columns)
    ends = {run.run_dir: ends_of(run) for run in runs}
    charts = []
    for title, of_title in columns.items():
        charts.append(make_chart(title, of_title, ends))
    return sorted(charts, key=lambda chart: position_of(chart, columns[chart.title]))


def columns_by_title(runs: Sequence[Run]) -> dict[str, list[Column]]:
    """The columns that are drawn, by the title of their chart."""
    columns: dict[str, list[Column]] = {}
    for run in runs:
        for column in columns_of(run):
            # With several runs, a chart of both train/loss and val/loss would mix two questions:
            # which run is better, and whether it overfits. The title names the metric there.
            if len(runs) == 1:
                columns.setdefault(title_of(column.name), []).append(column)
            # The steps of many runs would hide their means.
            elif not column.mean:
                own = column._replace(curve=run.name)
                columns.setdefault(column.curve, []).append(own)
    return columns


def columns_of(run: Run) -> list[Column]:
    """The metrics of a run that have a curve, sorted by their names."""
    rows_of: dict[str, Rows] = {}
    for row in run.rows:
        for name, value in row.items():
            if math.isfinite(value):
                rows_of.setdefault(name, []).append(row)
    columns = []
    for name in sorted(rows_of.keys() - {"epoch", "step"}):
        # The test comes once, at the end.
        if is_of_test(name):
            continue
        # train/loss or train/loss_step beside train/loss_epoch.
        base = name.removesuffix("_step").removesuffix("_epoch")
        curve, mean = name, ""
        if f"{base}_epoch" == name and rows_of.keys() & {base, f"{base}_step"}:
            curve = base
        elif f"{base}_epoch" in rows_of:
            curve, mean = f"{base} of single steps", base
        columns.append(Column(run, name, curve, mean, rows_of[name]))
    return columns


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


def make_chart(
    title: str, columns: Sequence[Column], ends: Mapping[Path, dict[str, list[float]]]
) -> Chart:
    """A chart over the epochs, or over the steps if an epoch has several values."""
    runs = [*dict.fromkeys(column.run.run_dir for column in columns)]
    # One axis for all curves: a chart cannot have epochs for one of them and steps for another.
    is_over_epochs = all(column.is_over_epochs for column in columns)
    axis = "epoch" if is_over_epochs else "step"
    curves = [make_curve(column, runs.index(column.run.run_dir)) for column in columns]
    return Chart(title, axis, curves, [ends[run_dir] for run_dir in runs])


def make_curve(column: Column, run: int) -> dict[str, Any]:
    """The name of a curve, its points over the steps, the step of the best epoch, and its run.

    Args:
        column: what it shows.
        run: the position of its run in the chart.
    """
    # The last row of an epoch wins: the star stands where the epoch ends.
    ends: dict[float | None, int] = {}
    for row in column.rows:
        if "epoch" in row:
            ends[row["epoch"] + 1] = int(row["step"]) + 1
    best = None
    # A star on the learning rate or the speed would suggest that these were best there.
    if is_result(column.name) and not column.mean:
        best = ends.get(column.run.status.best_epoch)
    shown = thin_out(column.rows)
    x = []
    y = []
    for row in shown:
        # metrics.csv counts steps from 0, the page from 1.
        x.append(int(row["step"]) + 1)
        # Places that a screen cannot show would only make the page larger.
        y.append(float(f"{row[column.name]:.{PRECISION}g}"))
    return {"name": column.curve, "mean": column.mean, "run": run, "best": best, "x": x, "y": y}


def ends_of(run: Run) -> dict[str, list[float]]:
    """Where the epochs of a run end: ``epoch``, ``step`` and ``time`` in seconds, from its start.

    The page draws any curve over any of these axes, with straight lines between the ends.
    """
    rows = []
    timed = []
    for row in run.rows:
        # The row of the test belongs to no epoch of the training.
        if "epoch" not in row or all(map(is_of_test, names_of(row))):
            continue
        rows.append(row)
        if TIME in row:
            timed.append(row)
    seconds = 0.0
    by_epoch: dict[float, dict[str, float]] = {}
    # An epoch that is not over has no time. A file of another origin may have none at all.
    for row in timed or rows:
        seconds += row.get(TIME, 0.0)
        epoch = row["epoch"] + 1
        by_epoch[epoch] = {"epoch": epoch, "step": row["step"] + 1, "time": round(seconds, 3)}
    ends: dict[str, list[float]] = {"epoch": [], "step": [], "time": []}
    for end in thin_out([*by_epoch.values()]):
        ends["epoch"].append(end["epoch"])
        ends["step"].append(end["step"])
        if seconds:
            ends["time"].append(end["time"])
    return ends


def names_of(row: Mapping[str, float]) -> list[str]:
    """The metrics of a row."""
    return [name for name in row if name not in ("epoch", "step")]


def thin_out(rows: Rows) -> Rows:
    """At most ``MAX_POINTS`` rows at even distances, the last row included."""
    distance = max(1, math.ceil(len(rows) / MAX_POINTS))
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
