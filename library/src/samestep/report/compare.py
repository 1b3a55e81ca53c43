"""Several runs side by side: what differs in their configuration, what they reached and cost.

Finished runs whose configuration differs in nothing but the seed are repeats of each other, and
make one group. A second run of one configuration and seed is no repeat, because equal seeds share
their noise: it is in a group of its own, such as the runs of changed code. An unfinished run is a
group of its own too. Two groups are compared by the difference of their means; where the same seeds
are in both, by the mean of the differences of each seed.

The tables are made once, of cells: for the terminal, for a page and for JSON.
"""

import itertools
import math
import re
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from samestep.errors import ConfigError
from samestep.report import charts
from samestep.report.files import Run, show, show_value
from samestep.run import metrics

SEED = re.compile(r"(.+\.)?seed")
CONFIDENCE = 0.95
LESS_IS_BETTER = {"loss", "error", "mae", "mse", "rmse", "perplexity", "time"}
STYLES = {"best": "bold", "better": "green", "worse": "red"}  # on a terminal
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


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run directories of paths, which may be folders that hold several runs.

    Raises:
        ConfigError: naming the path at which there is no run, or if there is only one run.
    """
    found: list[Path] = []
    for path in paths:
        configs = [*path.glob("config.yaml")] or sorted(path.glob("*/config.yaml"))
        if not configs:
            raise ConfigError(f"{path}: no such run; name directories such as runs/<id>")
        found += [config.parent.resolve() for config in configs]
    if len(set(found)) < 2:
        raise ConfigError(f"{found[0]} is one run; name at least two of them")
    return list(dict.fromkeys(found))


def compare(runs: Sequence[Run]) -> Tables:
    """Compare runs; the first one's group is what the others are compared with."""
    groups = group_runs(runs)
    names = [name_of(group) for group in groups]
    gaps = [f"{name} - {names[0]}" for name in names[1:]]
    about: dict[str, Callable[[Run], Any]] = {
        "runs": lambda run: run.name,
        "state": lambda run: run.status.state,
        "seeds": lambda run: run.values.get("seed", "?"),
        "tags": lambda run: ", ".join(map(str, run.status.tags)),
        "notes": lambda run: run.status.notes,
        "ranks": lambda run: run.status.start.get("world_size", "?"),
        "epochs": lambda run: metrics.count_epochs(run.rows),
        "steps": lambda run: metrics.count_steps(run.rows),
    }
    each = [list(group.values()) for group in groups]
    facts = {key: [join(map(fact, group)) for group in each] for key, fact in about.items()}
    keys = sorted({key for run in runs for key in run.values})
    values = {
        k: [join(run.values.get(k, "absent") for run in group) for group in each] for k in keys
    }
    differing = {key: row for key, row in values.items() if len(set(row)) > 1}
    figures = [{seeds: figures_of(run) for seeds, run in group.items()} for group in groups]
    found = {name for group in figures for each in group.values() for name in each}
    # What was learned comes first, and then what it has cost.
    in_order = sorted(found, key=lambda name: (name in TIMES or name.endswith("/s"), name))
    tables = {
        "Runs": (names, {key: row for key, row in facts.items() if any(row)}),
        "Configuration: what differs": (names, differing),
        "Final figures": (
            [*names, *gaps],
            {name: compare_figure(name, figures, direction_of(name, runs)) for name in in_order},
        ),
    }
    return {
        title: [[Cell(), *map(Cell, heading)], *([Cell(key), *row] for key, row in rows.items())]
        for title, (heading, rows) in tables.items()
        if rows
    }


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Put runs together that differ in nothing but the seed, in order of their first run."""
    groups: dict[tuple[str, int], Group] = {}
    for run in runs:
        seeds = {key: value for key, value in run.values.items() if SEED.fullmatch(key)}
        rest = [(key, run.values[key]) for key in sorted(run.values) if key not in seeds]
        # Runs without a configuration or without final figures repeat nothing that is known.
        is_known = rest and run.figures
        same = str((rest, run.status.start.get("world_size")) if is_known else run.run_dir)
        own = str(seeds or run.run_dir)
        number = next(n for n in itertools.count() if own not in groups.get((same, n), ()))
        groups.setdefault((same, number), {})[own] = run
    return list(groups.values())


def name_of(group: Group) -> str:
    """The name of the first run, with what else a reader must know of the group."""
    first = next(iter(group.values()))
    if not first.figures:
        return f"{first.name} ({first.status.state}, newest metrics)"
    return f"{first.name} (n = {len(group)})" if len(group) > 1 else first.name


def join(values: Iterable[Any]) -> Cell:
    """Equal values once, others in a row, such as the seeds of repeats."""
    return Cell(", ".join(dict.fromkeys(show_value(value) for value in values if value != "")))


def figures_of(run: Run) -> dict[str, float]:
    """The final figures and speeds; of an unfinished run its newest metrics."""
    newest = {name: value for row in run.rows for name, value in row.items()}
    found = (run.figures or newest) | metrics.speeds(run.rows)
    names = [name for name in found if metrics.is_result(name) or name in TIMES]
    return {name: found[name] for name in names if math.isfinite(found[name])}


def direction_of(name: str, runs: Sequence[Run]) -> int:
    """1 if more of a figure is better, -1 if less is, 0 if that is not known.

    The mode of a monitored metric counts for each figure that has its name in its own.
    """
    words = set(re.split("[/_]", name))
    for status in (run.status for run in runs if run.status.mode):
        if set(re.split("[/_]", charts.title_of(status.monitor))) <= words:
            return 1 if status.mode == "max" else -1
    return 1 if name.endswith("/s") else -1 if words & LESS_IS_BETTER else 0


def compare_figure(
    name: str, groups: Sequence[dict[str, dict[str, float]]], direction: int
) -> list[Cell]:
    """A figure of each group, the best one marked, and its differences from the first group.

    A difference within its interval may be chance, and is neither better nor worse.

    Args:
        name: of the figure.
        groups: the figures of each run by its seeds, for each group.
        direction: as ``direction_of`` says.
    """
    base, *others = [
        {seeds: each[name] for seeds, each in group.items() if name in each} for group in groups
    ]
    row = [estimate(values) for values in (base, *others)]
    scores = [direction * cell.value["mean"] for cell in row if cell.value]
    for cell in row:
        if cell.value and min(scores) < direction * cell.value["mean"] == max(scores):
            cell.mark = "best"
    gaps = [estimate(values, base) if base else Cell() for values in others]
    for gap in gaps:
        if gap.value and direction and abs(gap.value["mean"]) > (gap.value["interval95"] or 0):
            gap.mark = "better" if gap.value["mean"] * direction > 0 else "worse"
    return row + gaps


def estimate(values: dict[str, float], base: dict[str, float] | None = None) -> Cell:
    """The mean of repeats, or its difference from that of a base; empty without values.

    The interval is Student's t; of a difference seed by seed where both have the same seeds, and
    otherwise Welch's t.

    Args:
        values: by the seeds of their runs.
        base: what they are compared with, by seeds too.
    """
    if not values:
        return Cell()
    own, other = list(values.values()), list((base or {}).values())
    if is_paired := base is not None and base.keys() == values.keys() and len(own) > 1:
        own, other = [values[seeds] - base[seeds] for seeds in values], []
    mean, half = statistics.fmean(own) - (statistics.fmean(other) if other else 0), None
    num = min(len(own), len(other) or len(own))
    if num > 1:
        # Its import takes a second, which runs without repeats need not wait for.
        from scipy import stats  # type: ignore[import-untyped]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of equal values, whose interval is 0
            welch = other and stats.ttest_ind(own, other, equal_var=False)
            low, high = (welch or stats.ttest_1samp(own, 0)).confidence_interval(CONFIDENCE)
        half = float(high - low) / 2
    sign = "+" if base is not None and mean > 0 else ""
    interval = "" if half is None else f" ± {show(half) if half >= 100 else f'{half:.2g}'}"
    cell = Cell(f"{sign}{show(mean)}{interval}{' paired' if is_paired else ''}")
    cell.value = {"mean": mean, "interval95": half, "n": num, "paired": is_paired}
    return cell


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
            # As text: a name may look like rich's markup. A best value is marked without colours.
            words = [f"{cell} (best)" if cell.mark == "best" else cell for cell in row]
            styles = [STYLES.get(cell.mark, "") for cell in row]
            table.add_row(*map(Text, words, styles))
        console.print(table)
