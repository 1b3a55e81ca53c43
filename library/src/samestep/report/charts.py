"""Curves of metrics, as data that ``charts.js`` draws with Plotly, and in words beside them."""

import base64
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from samestep.report.files import Run
from samestep.run.metrics import is_result

MAX_POINTS = 1000  # of a curve; more of them cannot be seen
PLACES = 6  # of a point, the first that is not 0 included

Points = list[tuple[float, float]]


class Curve(NamedTuple):
    """The points of one curve; those whose value is not finite are left out."""

    name: str
    points: Points
    best: float | None = None
    """Where the best epoch of its run is on the axis; None: not known, or no result of it."""

    @property
    def text(self) -> str:
        """The first, last, lowest and highest value, and that of the best epoch."""
        low, high = (choose(self.points, key=lambda point: point[1]) for choose in (min, max))
        best = [f", {y:.4g} in the best epoch" for x, y in self.points if x == self.best]
        return (
            f"{self.name}: {self.points[0][1]:.4g} at first, {self.points[-1][1]:.4g} at last, "
            f"lowest {low[1]:.4g} (at {low[0]:g}), highest {high[1]:.4g} (at {high[0]:g})"
            f"{''.join(best)}."
        )


class Chart(NamedTuple):
    """Curves over the same axis."""

    title: str
    axis: str
    """What the axis counts, from 1: epoch or step."""
    curves: list[Curve]

    @property
    def is_about_machine(self) -> bool:
        """Whether it shows speed, time or memory, and nothing of what is learned."""
        return bool(re.match("time/|system/|.*_per_second", self.title))

    @property
    def text(self) -> str:
        """What the curves show, in words."""
        axis = f"Over the {self.axis}s: " if self.curves else "There is no value."
        return axis + " ".join(curve.text for curve in self.curves)

    @property
    def data(self) -> str:
        """What ``charts.js`` draws, as JSON."""
        curves = [
            {
                "name": curve.name, "best": curve.best,
                "x": [x for x, _ in _thin(curve.points)],
                "y": [float(f"{y:.{PLACES}g}") for _, y in _thin(curve.points)],
            }
            for curve in self.curves
        ]  # fmt: skip
        return json.dumps({"title": self.title, "axis": self.axis, "curves": curves})


def of_run(rows: Sequence[Mapping[str, float]], best_epoch: int | None = None) -> list[Chart]:
    """The columns of ``metrics.csv`` as charts; metrics of the same name share one.

    What has several values in an epoch is drawn over the steps. Final figures of the test are no
    curves. What is both trained and validated comes first, and the machine last.
    """
    names = {name for row in rows for name in row} - {"epoch", "step"}
    if {"lr", "step/lr"} <= names:  # the same figure twice: that with more points
        counts = {name: sum(name in row for row in rows) for name in ("lr", "step/lr")}
        names.remove(min(counts, key=lambda name: counts[name]))
    titles: dict[str, list[str]] = {}
    for name in sorted(names):
        if not name.startswith(("test/", "test_")):
            titles.setdefault(title_of(name), []).append(name)
    charts = [_chart(rows, title, names, best_epoch) for title, names in titles.items()]
    rank = [(chart.is_about_machine, -len(chart.curves), chart.title) for chart in charts]
    return [chart for _, chart in sorted(zip(rank, charts, strict=True))]


def of_runs(runs: Sequence[Run]) -> list[Chart]:
    """The charts of several runs: each metric with the curves of all of them; of one, its own."""
    of_each = {run.name: of_run(run.rows, run.status.best_epoch) for run in runs}
    if len(runs) == 1:
        return of_each[runs[0].name]
    found: dict[tuple[bool, bool, str, str], Chart] = {}
    for name, charts in of_each.items():
        for chart in charts:
            for curve in chart.curves:
                key = (chart.is_about_machine, not is_result(curve.name), curve.name, chart.axis)
                shared = found.setdefault(key, Chart(curve.name, chart.axis, []))
                shared.curves.append(curve._replace(name=name))
    return [found[key] for key in sorted(found)]


def title_of(name: str) -> str:
    """``train/loss_step`` and ``val_loss`` as ``loss``: what shares a chart."""
    return re.sub(r"^(train|val)[/_]|_(step|epoch)$", "", name)


def _chart(
    rows: Sequence[Mapping[str, float]], title: str, names: list[str], best_epoch: int | None
) -> Chart:
    columns = {name: [row for row in rows if name in row] for name in names}
    axis = "epoch" if all(map(_has_one_per_epoch, columns.values())) else "step"
    curves = []
    for name, column in columns.items():
        finite = [row for row in column if math.isfinite(row[name])]
        points: Points = [(int(row.get(axis, 0)) + 1, row[name]) for row in finite]
        best = best_epoch if axis == "epoch" and is_result(name) else None
        if points:
            curves.append(Curve(name, points, best))
    return Chart(title, axis, curves)


def _has_one_per_epoch(column: Sequence[Mapping[str, float]]) -> bool:
    epochs = [row.get("epoch") for row in column]
    return None not in epochs and len(set(epochs)) == len(epochs)


def _thin(points: Points) -> Points:
    """At most ``MAX_POINTS`` of them, at even distances, and always the last one."""
    stride = math.ceil(len(points) / MAX_POINTS)
    return points[::-1][::stride][::-1]


@cache
def plotly_gz() -> bytes:
    """Plotly's program of the installed package, compressed; the package itself is not imported."""
    spec = find_spec("plotly")
    assert spec
    assert spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "package_data/plotly.min.js"
    compressor = zlib.compressobj(4, wbits=31)  # a gzip in 0.1 s; 9 takes 0.24 s for 4 % less
    return compressor.compress(path.read_bytes()) + compressor.flush()


def plotly_text() -> str:
    """The same for a page, which unpacks it: a third of its size."""
    return base64.b64encode(plotly_gz()).decode()
