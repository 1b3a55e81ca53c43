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
    for run in runs:
        for name in sorted({name for row in run.rows for name in row} - {"epoch", "step"}):
            rows = [row for row in run.rows if math.isfinite(row.get(name, math.nan))]
            if rows and not is_of_test(name):
                title = name if len(runs) > 1 else title_of(name)
                columns.setdefault(title, []).append((run, name, rows))
    # The same figure twice, of each epoch and of each step: the one with more points is drawn.
    num = {title: sum(len(rows) for *_, rows in lines) for title, lines in columns.items()}
    columns.pop(min("lr", "step/lr", key=lambda name: num.get(name, 0)), None)
    charts = [chart_of(title, lines, len(runs)) for title, lines in columns.items()]
    are_results = {title for title, lines in columns.items() if is_result(lines[0][1])}
    return sorted(
        charts,
        key=lambda c: (c.is_about_machine, c.title not in are_results, -len(c.curves), c.title),
    )


def chart_of(title: str, lines: Sequence[tuple[Run, str, Rows]], num_runs: int) -> Chart:
    """A chart over the epochs, or over the steps where an epoch has several values."""
    epochs = [{row.get("epoch") for row in rows} - {None} for *_, rows in lines]
    sizes = [len(rows) for *_, rows in lines]
    axis, curves = "epoch" if list(map(len, epochs)) == sizes else "step", []
    for run, name, rows in lines:
        # At even distances, and always the last one.
        shown = rows[:: -math.ceil(len(rows) / MAX_POINTS)][::-1]
        ends = {row["epoch"] + 1: int(row[axis]) + 1 for row in rows if "epoch" in row}
        curves.append({
            "name": name if num_runs == 1 else run.name,
            "best": ends.get(run.status.best_epoch or 0) if is_result(name) else None,
            "x": [int(row[axis]) + 1 for row in shown],
            "y": [float(f"{row[name]:.{PLACES}g}") for row in shown],
        })  # fmt: skip
    return Chart(title, axis, curves)


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
