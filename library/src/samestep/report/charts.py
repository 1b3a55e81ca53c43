"""Curves as SVG, drawn by matplotlib, in colours that the page chooses for light and dark."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Points = list[tuple[float, float]]

MAX_POINTS = 1000  # of a curve; more of them cannot be seen
# Stand-ins for the colours of the page. matplotlib writes them into the SVG, and they are replaced
# by CSS variables there.
INK, GRID = "#010203", "#010204"
SERIES = [f"#0102{number:02x}" for number in range(16, 24)]
DASHES = ["-", "--", ":", "-."]
LEGEND_WIDTH = 80  # characters beside each other
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be searched, copied and read aloud
    "path.simplify": True,
    "font.size": 11,
    "text.parse_math": False,  # a name may hold dollars
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "legend.frameon": False,
}
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


class Chart(NamedTuple):
    """One chart and its description."""

    title: str
    svg: str
    text: str
    """What the curves show, in words."""


def draw(title: str, curves: Mapping[str, Points], x_name: str) -> Chart:
    """Draw curves over the same axis. Values that are not finite are left out.

    Args:
        title: what is drawn, such as ``loss``; it also makes the names within the SVG unique.
        curves: the points of each curve, by its name.
        x_name: what the axis counts, such as ``epoch``.
    """
    finite = {name: _finite(points) for name, points in curves.items()}
    finite = {name: points for name, points in finite.items() if points}
    num_columns = max(1, LEGEND_WIDTH // (max(map(len, finite), default=0) + 12))
    legend_height = 0.25 * math.ceil(len(finite) / num_columns)  # in inches
    height = 3.0 + legend_height
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(6.4, height))
        axes = figure.add_axes((0.12, 0.5 / height, 0.86, 2.45 / height))
        lines = []
        for number, points in enumerate(finite.values()):
            xs, ys = zip(*_thin(points), strict=True)
            color = SERIES[number % len(SERIES)]
            dash = DASHES[(number + number // len(SERIES)) % len(DASHES)]
            marker = "o" if len(xs) <= 30 else ""
            lines += axes.plot(xs, ys, dash, color=color, marker=marker, markersize=3.5, lw=1.8)
        axes.set_xlabel(x_name)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if lines:
            # Above the curves, so that it hides nothing.
            style = {"bbox_to_anchor": (-0.08, 1), "ncols": num_columns, "fontsize": 10}
            axes.legend(lines, list(finite), loc="lower left", **style)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=NO_METADATA)
    return Chart(title, for_page(text.getvalue()), describe(finite, x_name))


def for_page(svg: str) -> str:
    """The SVG as a part of a page: no header, no style for the whole page, colours by variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.S)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # equal in all charts, and never referred to
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt" ', "", svg, count=1)  # as wide as its place
    svg = re.sub(r"font-family: [^;\"]*", "font-family: inherit", svg)
    svg = svg.replace(INK, "currentColor").replace(GRID, "var(--grid)")
    for number, color in enumerate(SERIES):
        svg = svg.replace(color, f"var(--series-{number})")
    # A screen reader gets the description beside it.
    return svg.replace("<svg ", '<svg aria-hidden="true" ', 1)


def describe(curves: Mapping[str, Points], x_name: str) -> str:
    """The first, last, lowest and highest value of each curve."""
    sentences = []
    for name, points in curves.items():
        low, high = (choose(points, key=lambda point: point[1]) for choose in (min, max))
        sentences.append(
            f"{name}: {points[0][1]:.4g} at first, {points[-1][1]:.4g} at last, "
            f"lowest {low[1]:.4g} ({x_name} {low[0]:g}), "
            f"highest {high[1]:.4g} ({x_name} {high[0]:g})."
        )
    return " ".join(sentences) or "There is no value."


def curves_of(rows: Sequence[Mapping[str, float]]) -> dict[str, tuple[str, dict[str, Points]]]:
    """The columns of ``metrics.csv`` as charts: ``{"loss": ("epoch", {"train/loss": ...})}``.

    Metrics of the same name share a chart. What has several values in an epoch is drawn over the
    steps. Final figures of the test are no curves.
    """
    # What is both trained and validated comes first, such as the loss.
    titles: dict[str, list[str]] = {}
    for name in sorted({name for row in rows for name in row} - {"epoch", "step"}):
        if not name.startswith(("test/", "test_")):
            titles.setdefault(title_of(name), []).append(name)
    in_order = sorted(titles, key=lambda title: (-len(titles[title]), title))
    return {title: _curves(rows, titles[title]) for title in in_order}


def title_of(name: str) -> str:
    """``train/loss_step`` and ``val_loss`` as ``loss``: what shares a chart."""
    return re.sub(r"^(train|val)[/_]|_(step|epoch)$", "", name)


def _curves(rows: Sequence[Mapping[str, float]], names: list[str]) -> tuple[str, dict[str, Points]]:
    """The columns over what their chart counts, epochs or steps, both from 1."""
    columns = {name: [row for row in rows if name in row] for name in names}
    axis = "epoch" if all(map(_has_one_per_epoch, columns.values())) else "step"
    return axis, {
        name: [(row.get(axis, 0) + 1, row[name]) for row in column]
        for name, column in columns.items()
    }


def _has_one_per_epoch(column: Sequence[Mapping[str, float]]) -> bool:
    epochs = [row.get("epoch") for row in column]
    return None not in epochs and len(set(epochs)) == len(epochs)


def _finite(points: Points) -> Points:
    return [(x, y) for x, y in points if math.isfinite(y)]


def _thin(points: Points) -> Points:
    """At most ``MAX_POINTS`` of them, at even distances, and always the last one."""
    stride = math.ceil(len(points) / MAX_POINTS)
    return points[::-1][::stride][::-1]
