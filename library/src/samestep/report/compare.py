"""Compare runs: configuration, final figures, time and speed, and curves.

samestep compare runs/one runs/two
samestep compare runs/mine-* --html compare.html
samestep compare runs/seeds runs/other-seeds --json

A path may also be a folder of runs, such as one of a sweep. Finished runs that differ in nothing
but the seed are repeats: their mean is shown, with its 95 % confidence interval. A second run of
the same seed, or one that is not finished, is shown beside them.
"""

import json
import math
import re
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from samestep.command_line import Parser
from samestep.errors import ConfigError
from samestep.ranks import environment
from samestep.report import charts, page
from samestep.report.files import Run, read_run, show, show_value
from samestep.run import metrics
from samestep.run.files import write_text

SEED = re.compile(r"(.+\.)?seed")
CONFIDENCE = 0.95
LESS_IS_BETTER = {"loss", "error", "mae", "mse", "rmse", "perplexity", "time"}
STYLES = {"": "", "best": "bold", "better": "green", "worse": "red"}  # on a terminal
TIMES = ("time/total_s", "time/epoch_s")


class Cell(str):
    """A text of a table, and the figure that it shows, if it shows one."""

    value: dict[str, Any] | None = None
    """``mean``; ``interval95``, half of its 95 % confidence interval, None for a single value;
    ``n``, the number of runs; and ``paired``, if it is a difference of runs of the same seeds."""
    mark = ""
    """Best of its row, better or worse than the first, or none."""


Tables = dict[str, list[list[Cell]]]
"""The tables of a comparison by their titles, each with its heading first."""

Group = dict[str, Run]
"""Runs that repeat each other, by their seeds."""


def main(argv: Sequence[str]) -> int:
    """Print the comparison of several runs; write the page if it is wanted."""
    parser = Parser("samestep compare", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, or folders of runs")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with curves")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse(argv)
    environment.limit_threads()
    runs = [read_run(path) for path in find_runs(arguments.runs)]
    tables = compare(runs)
    if arguments.json:
        # By title and row, the heading as "columns", and figures as numbers.
        plain = {
            title: {key or "columns": [cell.value or cell for cell in row] for key, *row in rows}
            for title, rows in tables.items()
        }
        print(json.dumps(plain, indent=2))
    else:
        print_tables(tables)
    if arguments.html:
        title = " and ".join(tables["Runs"][0][1:])
        write_text(arguments.html, page.render("compare.html", title, runs, tables=tables))
    return 0


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run directories of paths, which may be folders that hold several runs.

    Raises:
        ConfigError: naming the path at which there is no run, or if there is only one run.
    """
    found: dict[Path, None] = {}
    for path in paths:
        configs = [*path.glob("config.yaml")] or sorted(path.glob("*/config.yaml"))
        if not configs:
            raise ConfigError(f"{path}: no such run; name directories such as runs/<id>")
        found |= dict.fromkeys(config.parent.resolve() for config in configs)
    if len(found) < 2:
        raise ConfigError(f"{next(iter(found))} is one run; name at least two of them")
    return list(found)


def compare(runs: Sequence[Run]) -> Tables:
    """Compare runs; the first one's group is what the others are compared with.

    Finished runs whose configuration differs in nothing but the seed make one group, and every
    other run is a group of its own. Groups are compared by the difference of their means; where
    both have the same seeds, by the mean of the differences of each seed.
    """
    groups = group_runs(runs)
    names = [name_of(group) for group in groups]
    heading = list(map(Cell, ["", *names]))
    gaps = [Cell(f"{name} - {names[0]}") for name in names[1:]]
    facts, values = rows_of(groups, facts_of), rows_of(groups, lambda run: run.values)
    differences = sorted(row for row in values if len(set(row[1:])) > 1)
    figures: dict[str, list[dict[str, float]]] = {}
    for number, group in enumerate(groups):
        for seeds, run in group.items():
            for name, figure in figures_of(run).items():
                figures.setdefault(name, [{} for _ in groups])[number][seeds] = figure
    # What was learned comes first, and then what it has cost.
    in_order = sorted(figures, key=lambda name: (name in TIMES or name.endswith("/s"), name))
    return {
        "Runs": [heading, *(row for row in facts if any(row[1:]))],
        "Configuration: what differs": [
            heading, *(differences or [[Cell("nothing"), *(Cell("") for _ in groups)]]),
        ],
        "Final figures": [
            heading + gaps,
            *(compare_figure(name, figures[name], direction_of(name, runs)) for name in in_order),
        ],
    }  # fmt: skip


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Put runs together that differ in nothing but the seed, in order of their first run.

    A second run of one configuration and seed is no repeat, because equal seeds share their noise:
    it is in a group of its own, such as the runs of changed code.
    """
    groups: dict[str, Group] = {}
    for run in runs:
        values = sorted(run.values.items())
        seeds = str([pair for pair in values if SEED.fullmatch(pair[0])])
        rest = [pair for pair in values if not SEED.fullmatch(pair[0])]
        same = f"{rest} {run.status.start.get('world_size')}"
        if not run.config or not run.figures:
            same = str(run.run_dir)  # it repeats nothing that is known
        while seeds in groups.get(same, {}):
            same += " again"
        groups.setdefault(same, {})[seeds] = run
    return list(groups.values())


def name_of(group: Group) -> str:
    """The name of the first run, with what else a reader must know of the group."""
    first = next(iter(group.values()))
    if not first.figures:
        return f"{first.name} ({first.status.state}, newest metrics)"
    return f"{first.name} (n = {len(group)})" if len(group) > 1 else first.name


def facts_of(run: Run) -> dict[str, Any]:
    """What a reader must know of a run before its figures."""
    return {
        "runs": run.name,
        "state": run.status.state,
        "seeds": run.values.get("seed", "?"),
        "tags": ", ".join(map(str, run.status.tags)),
        "notes": run.status.notes,
        "ranks": run.status.start.get("world_size", "?"),
        "epochs": metrics.count_epochs(run.rows),
        "steps": metrics.count_steps(run.rows),
    }


def rows_of(groups: Sequence[Group], describe: Callable[[Run], dict[str, Any]]) -> list[list[Cell]]:
    """A row for each key of what describes the runs, and in it a cell for each group."""
    found = [[describe(run) for run in group.values()] for group in groups]
    keys = dict.fromkeys(key for group in found for each in group for key in each)
    return [
        [Cell(key), *(join(each.get(key, "absent") for each in group) for group in found)]
        for key in keys
    ]


def join(values: Iterable[Any]) -> Cell:
    """Equal values once, others in a row, such as the seeds of repeats."""
    return Cell(", ".join(filter(None, dict.fromkeys(map(show_value, values)))))


def figures_of(run: Run) -> dict[str, float]:
    """The final figures and speeds; of an unfinished run its newest metrics."""
    found = dict(run.figures)
    for row in [] if found else run.rows:
        found |= row
    found |= metrics.speeds(run.rows)
    return {
        name: value
        for name, value in found.items()
        if math.isfinite(value) and (metrics.is_result(name) or name in TIMES)
    }


def direction_of(name: str, runs: Sequence[Run]) -> int:
    """1 if more of a figure is better, -1 if less is, 0 if that is not known.

    The mode of a monitored metric counts for each figure that has its name in its own.
    """
    words = set(re.split("[/_]", name))
    for status in (run.status for run in runs if run.status.mode):
        if words.issuperset(re.split("[/_]", charts.title_of(status.monitor))):
            return 1 if status.mode == "max" else -1
    return 1 if name.endswith("/s") else -1 if words & LESS_IS_BETTER else 0


def compare_figure(name: str, groups: Sequence[dict[str, float]], direction: int) -> list[Cell]:
    """A row: a figure of each group, the best one marked, and its differences from the first group.

    A difference within its interval may be chance, and is neither better nor worse.

    Args:
        name: of the figure.
        groups: its values by the seeds of their runs, for each group.
        direction: as ``direction_of`` says.
    """
    figures = [estimate(values) for values in groups]
    gaps = [estimate(values, groups[0]) for values in groups[1:]]
    scores = [direction * cell.value["mean"] for cell in figures if cell.value]
    for cell in figures:
        if cell.value and direction * cell.value["mean"] == max(scores) > min(scores):
            cell.mark = "best"
    for gap in gaps:
        score = direction * gap.value["mean"] if gap.value else 0
        if gap.value and abs(score) > (gap.value["interval95"] or 0):
            gap.mark = "better" if score > 0 else "worse"
    return [Cell(name), *figures, *gaps]


def estimate(values: dict[str, float], base: dict[str, float] | None = None) -> Cell:
    """The mean of repeats, or its difference from that of a base; empty if one has no values.

    The interval is Student's t; of a difference seed by seed where both have the same seeds, and
    otherwise Welch's t.

    Args:
        values: by the seeds of their runs.
        base: what they are compared with, by seeds too.
    """
    if not values or base == {}:
        return Cell()
    own, other = list(values.values()), list((base or {}).values())
    is_paired = len(own) > 1 and base is not None and base.keys() == values.keys()
    if base and is_paired:
        own, other = [values[seeds] - base[seeds] for seeds in values], []
    mean = statistics.fmean(own) - statistics.fmean(other or [0])
    num = min(len(own), len(other or own))
    half = half_width(own, other) if num > 1 else None
    text = f"+{show(mean)}" if base and mean > 0 else show(mean)
    if half is not None:
        text += f" ± {show(half) if half >= 100 else f'{half:.2g}'}"
    cell = Cell(f"{text} paired" if is_paired else text)
    cell.value = {"mean": mean, "interval95": half, "n": num, "paired": is_paired}
    return cell


def half_width(own: Sequence[float], other: Sequence[float]) -> float:
    """Half of the confidence interval of a mean, or of its difference from another mean."""
    # Its import takes a second, which runs without repeats need not wait for.
    from scipy import stats  # type: ignore[import-untyped]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of equal values, whose interval is 0
        welch = other and stats.ttest_ind(own, other, equal_var=False)
        low, high = (welch or stats.ttest_1samp(own, 0)).confidence_interval(CONFIDENCE)
    return float(high - low) / 2


def print_tables(tables: Tables) -> None:
    """Print the tables for a terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A file has no width: no line is broken there.
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 1000, highlight=False)
    for title, (heading, *rows) in tables.items():
        table = Table(box=box.SIMPLE, title=title, title_justify="left")
        for name in heading:
            table.add_column(Text(name), overflow="fold")
        for row in rows:
            # As text: a name may look like rich's markup. Marks are also seen without colours.
            words = [f"{cell} ({cell.mark})" if cell.mark else cell for cell in row]
            table.add_row(*map(Text, words, [STYLES[cell.mark] for cell in row]))
        console.print(table)
