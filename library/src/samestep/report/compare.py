"""Several runs side by side: what differs in their configuration, what they reached and cost.

Finished runs whose configuration differs in nothing but the seed are repeats of each other, and
make one group. A second run of one configuration and seed is no repeat, because equal seeds share
their noise: it is in a group of its own, such as the runs of changed code. An unfinished run is a
group of its own too. A group has a mean of each figure, and a 95 % confidence interval by Student's
t. Two groups are compared by the difference of their means; where the same seeds are in both, by
the mean of the differences of each seed.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from samestep.errors import ConfigError
from samestep.keys import Nature, nature_of
from samestep.report import charts
from samestep.report.files import Run
from samestep.report.page import render, show, words_of
from samestep.run.metrics import is_result

if TYPE_CHECKING:
    from rich.text import Text

SEED = re.compile(r"(.+\.)?seed")
CONFIDENCE = 0.95
LESS_IS_BETTER = {"loss", "error", "mae", "mse", "rmse", "perplexity"}
STYLES = {"best": "bold", "better": "green", "worse": "red"}  # on a terminal


class Estimate(NamedTuple):
    """The mean of a figure, or of a difference, and how far the true one may be from it."""

    mean: float
    interval95: float | None
    """Half of the 95 % confidence interval; None for a single value."""
    n: int
    paired: bool = False
    """Whether it is a difference of runs that were compared seed by seed."""

    def __str__(self) -> str:
        """Such as ``0.984 ± 0.003``."""
        interval = "" if self.interval95 is None else f" ± {self.interval95:.2g}"
        return f"{show(self.mean)}{interval}{' paired' if self.paired else ''}"


class Cell(str):
    """A text of a table, and its mark: best of its row, better or worse than the first, or none."""

    mark: str

    def __new__(cls, text: object = "", mark: str = "") -> Cell:
        """Make the text; a str takes no ``__init__``."""
        cell = super().__new__(cls, text)
        cell.mark = mark
        return cell


class Group(NamedTuple):
    """Runs that repeat each other with other seeds."""

    name: str
    runs: list[Run]

    def values(self, figure: str) -> dict[Any, float]:
        """A figure by the seeds of its run, of the runs that have it."""
        found = {}
        for run in self.runs:
            value = figures_of(run).get(figure)
            if value is not None:
                found[seeds_of(run)] = value
        return found


class Comparison(NamedTuple):
    """What is shown, by ``to_json``, by the terminal and by the page."""

    groups: list[Group]
    differences: dict[str, list[str]]
    """Each key of the configuration that differs, and its value in each group."""
    figures: dict[str, list[tuple[Estimate | None, Estimate | None]]]
    """Each figure: its value in each group, and how that differs from the first group."""
    costs: dict[str, list[str]]
    """Processes, times and speeds of each group."""


def find_runs(patterns: Sequence[str]) -> list[Path]:
    """The run directories of paths, globs, and folders that hold several runs.

    Raises:
        ConfigError: naming the pattern at which there is no run, or if there is only one run.
    """
    found: dict[Path, Path] = {}  # by its real path: a link to a run is the same run
    for pattern in patterns:
        configs = [
            config
            for path in _matching(pattern)
            for config in [*path.glob("config.yaml")] or sorted(path.glob("*/config.yaml"))
        ]
        if not configs:
            raise ConfigError(f"{pattern}: no such run; name directories such as runs/<id>")
        for config in configs:
            found.setdefault(config.parent.resolve(), config.parent)
    if len(found) < 2:
        raise ConfigError(f"{next(iter(found.values()))} is one run; name at least two of them")
    return list(found.values())


def _matching(pattern: str) -> list[Path]:
    """The path itself, or the paths that a glob stands for where the shell has not replaced it."""
    if Path(pattern).exists():
        return [Path(pattern)]
    root = Path(pattern).anchor
    try:
        return sorted(Path(root).glob(pattern.removeprefix(root)))
    except (ValueError, IndexError):  # no pattern at all, such as an empty one
        return []


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare runs; the first one's group is what the others are compared with."""
    groups = group_runs(runs)
    names = sorted({name for group in groups for run in group.runs for name in figures_of(run)})
    figures = {name: [compare_figure(name, groups[0], group) for group in groups] for name in names}
    return Comparison(groups, config_differences(groups), figures, costs_of(groups))


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Put runs together that differ in nothing but the seed, in order of their first run."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    seen: Counter[tuple[Any, ...]] = Counter()  # runs of one configuration and the same seeds
    for run in runs:
        same = {k: v for k, v in compared_values(run).items() if not SEED.fullmatch(k)}
        key: tuple[Any, ...] = (repr(sorted(same.items())), num_ranks(run))
        # Runs without a configuration or without final figures repeat nothing that is known.
        if not same or not run.figures:
            key = (str(run.run_dir),)
        repeat = (*key, seeds_of(run))
        groups.setdefault((*key, seen[repeat]), []).append(run)
        seen[repeat] += 1
    return [Group(name_of(runs), runs) for runs in groups.values()]


def seeds_of(run: Run) -> str:
    """Every seed of the configuration; the directory of a run that has none."""
    seeds = {key: value for key, value in run.values.items() if SEED.fullmatch(key)}
    return repr(sorted(seeds.items())) if seeds else str(run.run_dir)


def name_of(runs: list[Run]) -> str:
    """The name of a run, or those of the repeats in short; of an unfinished one also its state."""
    if not runs[0].figures:
        return f"{runs[0].name} ({runs[0].status.state}, newest metrics)"
    return runs[0].name if len(runs) == 1 else f"{runs[0].name} (n = {len(runs)})"


def compared_values(run: Run) -> dict[str, Any]:
    """The configuration without what only says how the run looks."""
    return {k: v for k, v in run.values.items() if nature_of(k) < Nature.LOOKS}


def config_differences(groups: Sequence[Group]) -> dict[str, list[str]]:
    """The keys that are not the same in all runs, with the values in each group."""
    each = [[compared_values(run) for run in group.runs] for group in groups]
    keys = sorted({key for group in each for values in group for key in values})
    table = {
        key: [_words(values.get(key, "absent") for values in group) for group in each]
        for key in keys
    }
    return {key: words for key, words in table.items() if len(set(words)) > 1}


def _words(values: Any) -> str:
    """Equal values once, others in a row, such as the seeds of repeats."""
    return ", ".join(dict.fromkeys(words_of(value) for value in values if value != ""))


def figures_of(run: Run) -> dict[str, float]:
    """The final figures, without the times; of an unfinished run its newest metrics."""
    figures = {name: value for name, value in run.figures.items() if value is not None}
    if not run.figures:
        figures = {name: value for row in run.rows for name, value in row.items()}
    return {name: value for name, value in figures.items() if is_result(name)}


def compare_figure(
    name: str, first: Group, group: Group
) -> tuple[Estimate | None, Estimate | None]:
    """A figure of a group, and its difference from the first group; None where it is absent."""
    base, values = first.values(name), group.values(name)
    value = estimate(list(values.values())) if values else None
    if group is first or not base or not values:
        return value, None
    if base.keys() != values.keys():
        return value, difference_of_means(list(base.values()), list(values.values()))
    return value, estimate([values[seed] - base[seed] for seed in base])._replace(
        paired=len(base) > 1
    )


def estimate(values: Sequence[float]) -> Estimate:
    """The mean, and the half width of its 95 % confidence interval by Student's t."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Estimate(mean, None, 1)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, quantile(len(values) - 1) * error, len(values))


def difference_of_means(one: Sequence[float], other: Sequence[float]) -> Estimate:
    """The difference of two means, with the interval of Welch's t.

    Source: B. L. Welch (1947), "The generalization of Student's problem when several different
    population variances are involved".
    """
    mean = statistics.fmean(other) - statistics.fmean(one)
    num = min(len(one), len(other))
    if num == 1:
        return Estimate(mean, None, 1)
    errors = [statistics.variance(values) / len(values) for values in (one, other)]
    squares = sum(e**2 / (len(v) - 1) for e, v in zip(errors, (one, other), strict=True))
    if squares == 0:  # all values of each group are equal
        return Estimate(mean, 0.0, num)
    return Estimate(mean, quantile(sum(errors) ** 2 / squares) * math.sqrt(sum(errors)), num)


def quantile(degrees_of_freedom: float) -> float:
    """The value of Student's t that bounds 95 % of it on both sides."""
    # It is much quicker to import than scipy.stats.
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    return float(stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2))


def num_ranks(run: Run) -> int | None:
    """Processes of the newest start; None if it is not known."""
    ranks = run.status.start.get("world_size")
    return ranks if isinstance(ranks, int) else None


def costs_of(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Ranks, steps, times, speeds and scaling efficiency: means over the runs of each group."""
    ranks = [num_ranks(group.runs[0]) for group in groups]
    epoch_s = means_of([[run.figures.get("time/epoch_s") for run in g.runs] for g in groups])
    total_s = means_of([[run.figures.get("time/total_s") for run in g.runs] for g in groups])
    costs = {
        "ranks": [str(number or "?") for number in ranks],
        "epochs": [_words(run.num_epochs for run in group.runs) for group in groups],
        "steps": [_words(run.num_steps for run in group.runs) for group in groups],
    }
    figures = {"seconds of training": total_s, "seconds per epoch, median": epoch_s}
    for name in sorted({name for group in groups for run in group.runs for name in run.speeds}):
        figures[name] = means_of([[run.speeds.get(name) for run in g.runs] for g in groups])
    if len(set(ranks)) > 1:
        base = epoch_s[0]
        figures["speedup"] = [base / own if base and own else None for own in epoch_s]
        # It is 1 if twice the ranks take half the time.
        costs["scaling efficiency"] = [
            f"{faster * ranks[0] / number:.0%}" if faster and ranks[0] and number else ""
            for faster, number in zip(figures["speedup"], ranks, strict=True)
        ]
    shown = {key: ["" if v is None else show(v) for v in row] for key, row in figures.items()}
    return costs | shown


def means_of(groups: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The mean over each group of the values that are known; None without any."""
    known = [[value for value in values if value is not None] for values in groups]
    return [statistics.fmean(values) if values else None for values in known]


def to_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain containers."""
    groups, differences, figures, costs = comparison
    return {
        "groups": [{"name": g.name, "runs": [str(run.run_dir) for run in g.runs]} for g in groups],
        "configuration": differences,
        "figures": {
            name: [
                {"value": value and value._asdict(), "difference": gap and gap._asdict()}
                for value, gap in pairs
            ]
            for name, pairs in figures.items()
        },
        "costs": costs,
    }


def tables(comparison: Comparison) -> dict[str, list[list[str]]]:
    """The tables of the comparison by their titles, each with its heading first."""
    groups = comparison.groups
    names = [group.name for group in groups]
    about = {
        "runs": [", ".join(run.name for run in group.runs) for group in groups],
        "state": [_words(run.status.state for run in group.runs) for group in groups],
        "seeds": [_words(run.values.get("seed", "?") for run in group.runs) for group in groups],
        "tags": [_words(tag for run in group.runs for tag in run.status.tags) for group in groups],
        "notes": [_words(run.status.notes for run in group.runs) for group in groups],
    }
    figures = {
        name: cells_of(pairs, direction_of(name, groups))
        for name, pairs in comparison.figures.items()
    }
    gaps = [f"{name} - {names[0]}" for name in names[1:]]
    found = {
        "Runs": (["", *names], {key: row for key, row in about.items() if any(row)}),
        "Final figures, and differences from the first": (["figure", *names, *gaps], figures),
        "Configuration: what differs": (["key", *names], comparison.differences),
        "Time and speed": (["", *names], comparison.costs),
    }
    return {
        title: [heading, *([key, *row] for key, row in rows.items())]
        for title, (heading, rows) in found.items()
        if rows
    }


def direction_of(name: str, groups: Sequence[Group]) -> int:
    """1 if more of a figure is better, -1 if less is, 0 if that is not known.

    The mode of a monitored metric counts for each figure that has its name in its own.
    """
    words = set(re.split("[/_]", name))
    for status in (run.status for group in groups for run in group.runs):
        own = set(re.split("[/_]", charts.title_of(status.monitor or "")))
        if status.mode and own <= words:
            return 1 if status.mode == "max" else -1
    return -1 if words & LESS_IS_BETTER else 0


def cells_of(pairs: Sequence[tuple[Estimate | None, Estimate | None]], direction: int) -> list[str]:
    """The values of a figure, the best one marked, and the differences, better or worse.

    A difference within its interval may be chance, and is neither.
    """
    means = [value.mean * direction for value, _ in pairs if value]
    best = max(means) if direction and len(set(means)) > 1 else None
    row: list[str] = []
    for value, _ in pairs:
        is_best = value is not None and value.mean * direction == best
        row.append(Cell(value or "", "best" if is_best else ""))
    for _, gap in pairs[1:]:
        is_clear = gap is not None and abs(gap.mean) > (gap.interval95 or 0)
        mark = "better" if gap and gap.mean * direction > 0 else "worse"
        sign = "+" if gap and gap.mean > 0 else ""
        row.append(Cell(f"{sign}{gap or ''}", mark if direction and is_clear else ""))
    return row


def print_tables(comparison: Comparison, *, markdown: bool) -> None:
    """Print the tables for a terminal, or as Markdown for a document."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A file and a document have no width: no line is broken there.
    is_narrow = sys.stdout.isatty() and not markdown
    console = Console(file=sys.stdout, width=None if is_narrow else 1000, highlight=False)
    for title, (heading, *rows) in tables(comparison).items():
        style = box.MARKDOWN if markdown else box.SIMPLE
        table = Table(box=style, title=None if markdown else title, title_justify="left")
        for name in heading:
            table.add_column(Text(name), overflow="fold")
        for row in rows:
            # As text: a name may look like rich's markup.
            table.add_row(*(_text_of(cell, markdown) for cell in row))
        console.print(table)


def _text_of(cell: str, markdown: bool) -> Text:
    from rich.text import Text

    mark = getattr(cell, "mark", "")
    if mark == "best":
        return Text(f"**{cell}**" if markdown else f"{cell} (best)", STYLES[mark])
    return Text(cell, STYLES.get(mark, ""))


def to_page(comparison: Comparison) -> str:
    """The comparison as one page, with the curves of all runs over each other."""
    runs = [run for group in comparison.groups for run in group.runs]
    return render(
        "compare.html",
        title=" and ".join(group.name for group in comparison.groups),
        tables=tables(comparison),
        charts=charts.of_runs(runs),
        plotly=charts.plotly_text(),
        problems=[f"{run.name}: {problem}" for run in runs for problem in run.problems],
    )
