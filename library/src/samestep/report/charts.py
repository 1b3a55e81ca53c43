"""Curves of metrics, as data that ``charts.js`` draws with Plotly and puts into words."""

import base64
import gzip
import math
import re
from collections.abc import Sequence
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple

from samestep.report.files import Run
from samestep.run.metrics import Rows, is_of_test, is_result

MAX_POINTS = 1000  # of a curve; more of them cannot be seen
PLACES = 6  # of a point, the first that is not 0 included


class Chart(NamedTuple):
    """Curves over the same axis."""

    title: str
    axis: str  # what the axis counts, from 1: epoch or step
    curves: list[dict[str, Any]]  # name, points and place of the best epoch of each

    @property
    def is_about_machine(self) -> bool:
        """Whether it shows speed, time or memory, and nothing of what is learned."""
        return bool(re.match("time/|system/|.*_per_second", self.title))


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """The columns of ``metrics.csv`` as charts, results first and the machine last.

    Of one run, metrics of the same name share a chart, such as ``train/loss`` and ``val/loss``. Of
    several, each metric has a chart with the curves of all runs. Final figures of the test, and
    values that are not finite, are left out.
    """
    columns: dict[str, list[tuple[Run, str, Rows]]] = {}
    # The same figure twice: the one with more points is drawn, and of all runs the same one.
    rows = [row for run in runs for row in run.rows]
    fewer = min("lr", "step/lr", key=lambda name: sum(name in row for row in rows))
    for run in runs:
        names = {name for row in run.rows for name in row} - {"epoch", "step"}
        points = {
            name: [row for row in run.rows if math.isfinite(row.get(name, math.nan))]
            for name in sorted(names)
            if not is_of_test(name)
        }
        if {"lr", "step/lr"} <= names:
            del points[fewer]
        for name, rows in points.items():
            if rows:
                title = name if len(runs) > 1 else title_of(name)
                columns.setdefault(title, []).append((run, name, rows))
    charts = []
    for title, lines in columns.items():
        # What has several values in an epoch is drawn over the steps, and has no best one.
        epochs = [[row.get("epoch") for row in rows] for *_, rows in lines]
        once = [None not in each and len(set(each)) == len(each) for each in epochs]
        axis, curves = "epoch" if all(once) else "step", []
        for (run, name, rows), is_once in zip(lines, once, strict=True):
            # At even distances, and always the last one.
            shown = rows[:: -math.ceil(len(rows) / MAX_POINTS)][::-1]
            best = [row for row in rows if row.get("epoch", -1) + 1 == run.status.best_epoch]
            curves.append({
                "name": name if len(runs) == 1 else run.name,
                "best": int(best[0][axis]) + 1 if best and is_once and is_result(name) else None,
                "x": [int(row[axis]) + 1 for row in shown],
                "y": [float(f"{row[name]:.{PLACES}g}") for row in shown],
            })  # fmt: skip
        charts.append(Chart(title, axis, curves))
    are_results = {title for title, lines in columns.items() if is_result(lines[0][1])}
    return sorted(
        charts,
        key=lambda c: (c.is_about_machine, c.title not in are_results, -len(c.curves), c.title),
    )


def title_of(name: str) -> str:
    """``train/loss_step``, ``val_loss`` and ``loss/val`` as ``loss``: what shares a chart."""
    return re.sub(r"^(train|val)[/_]|[/_](train|val)$|_(step|epoch)$", "", name)


@cache
def plotly_gz() -> bytes:
    """Plotly's program of the installed package, compressed; the package itself is not imported."""
    path = Path(str(distribution("plotly").locate_file("plotly/package_data/plotly.min.js")))
    # In 0.1 s; level 9 takes 0.24 s for 4 % less.
    return gzip.compress(path.read_bytes(), 4, mtime=0)


def plotly_text() -> str:
    """The same for a page, which unpacks it: a third of its size."""
    return base64.b64encode(plotly_gz()).decode()
