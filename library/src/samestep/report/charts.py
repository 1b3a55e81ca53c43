"""Curves of metrics, as data that ``charts.js`` draws with Plotly and puts into words."""

import base64
import json
import math
import re
import zlib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple

from samestep.report.files import Run
from samestep.run.metrics import is_of_test, is_result

MAX_POINTS = 1000  # of a curve; more of them cannot be seen
PLACES = 6  # of a point, the first that is not 0 included


class Chart(NamedTuple):
    """Curves over the same axis."""

    title: str
    axis: str
    """What the axis counts, from 1: epoch or step."""
    curves: list[dict[str, Any]]
    """Name, points and best epoch of each; those whose value is not finite are left out."""

    @property
    def is_about_machine(self) -> bool:
        """Whether it shows speed, time or memory, and nothing of what is learned."""
        return bool(re.match("time/|system/|.*_per_second", self.title))

    @property
    def data(self) -> str:
        """What ``charts.js`` draws, as JSON."""
        return json.dumps(self._asdict())


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """The columns of ``metrics.csv`` as charts, results first and the machine last.

    Of one run, metrics of the same name share a chart, such as ``train/loss`` and ``val/loss``. Of
    several, each metric has a chart with the curves of all runs. Final figures of the test are no
    curves.
    """
    columns: dict[str, list[tuple[str, Run, str]]] = {}
    for run in runs:
        counts: dict[str, int] = {}
        for row in run.rows:
            for metric in row.keys() - {"epoch", "step"}:
                counts[metric] = counts.get(metric, 0) + math.isfinite(row[metric])
        # The same figure twice: the one with more points is drawn.
        if {"lr", "step/lr"} <= counts.keys():
            del counts[min("lr", "step/lr", key=lambda metric: counts[metric])]
        for metric in sorted(counts):
            if counts[metric] and not is_of_test(metric):
                title, curve = (metric, run.name) if runs[1:] else (title_of(metric), metric)
                columns.setdefault(title, []).append((curve, run, metric))
    found = [_chart(title, curves) for title, curves in columns.items()]
    results = {title for title, curves in columns.items() if is_result(curves[0][2])}
    return sorted(
        found, key=lambda c: (c.is_about_machine, c.title not in results, -len(c.curves), c.title)
    )


def title_of(name: str) -> str:
    """``train/loss_step``, ``val_loss`` and ``loss/val`` as ``loss``: what shares a chart."""
    return re.sub(r"^(train|val)[/_]|[/_](train|val)$|_(step|epoch)$", "", name)


def _chart(title: str, columns: Sequence[tuple[str, Run, str]]) -> Chart:
    points = [
        [row for row in run.rows if math.isfinite(row.get(metric, math.nan))]
        for _, run, metric in columns
    ]
    # What has several values in an epoch is drawn over the steps.
    epochs = [[row.get("epoch") for row in rows] for rows in points]
    is_step = any(None in each or len(set(each)) < len(each) for each in epochs)
    axis = "step" if is_step else "epoch"
    curves = []
    for (name, run, metric), rows in zip(columns, points, strict=True):
        # At even distances, and always the last one.
        shown = rows[:: -math.ceil(len(rows) / MAX_POINTS)][::-1]
        curves.append({
            "name": name,
            "best": None if is_step or not is_result(metric) else run.status.best_epoch,
            "x": [int(row[axis]) + 1 for row in shown],
            "y": [float(f"{row[metric]:.{PLACES}g}") for row in shown],
        })  # fmt: skip
    return Chart(title, axis, curves)


@cache
def plotly_gz() -> bytes:
    """Plotly's program of the installed package, compressed; the package itself is not imported."""
    path = Path(str(distribution("plotly").locate_file("plotly/package_data/plotly.min.js")))
    compressor = zlib.compressobj(4, wbits=31)  # a gzip in 0.1 s; 9 takes 0.24 s for 4 % less
    return compressor.compress(path.read_bytes()) + compressor.flush()


def plotly_text() -> str:
    """The same for a page, which unpacks it: a third of its size."""
    return base64.b64encode(plotly_gz()).decode()
