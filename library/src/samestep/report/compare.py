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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from samestep.errors import ConfigError
from samestep.keys import Nature, nature_of
from samestep.report.files import Run, read_run
from samestep.report.page import render, show, words_of
from samestep.run.metrics import is_result

SEED = re.compile(r"(.+\.)?seed")
CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A mean, and how far the true one may be from it."""

    mean: float
    half_width: float | None
    """Half of the 95 % confidence interval; None for a single value."""
    num: int

    def __str__(self) -> str:
        """Such as ``0.984 ± 0.003``."""
        return show(self.mean) + ("" if self.half_width is None else f" ± {show(self.half_width)}")


class Difference(NamedTuple):
    """How a group differs from the first one."""

    estimate: Estimate
    is_paired: bool
    """Whether the runs were compared seed by seed."""

    def __str__(self) -> str:
        """Such as ``+0.002 ± 0.003 paired``."""
        sign = "+" if self.estimate.mean > 0 else ""
        return f"{sign}{self.estimate}{' paired' if self.is_paired else ''}"


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
    figures: dict[str, list[tuple[Estimate | None, Difference | None]]]
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
        runs = [run for path in _matching(pattern) for run in _runs_in(path)]
        if not runs:
            raise ConfigError(f"{pattern}: there is no run; name directories such as runs/<id>")
        for run in runs:
            found.setdefault(run.resolve(), run)
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


def _runs_in(path: Path) -> list[Path]:
    if (path / "config.yaml").is_file():
        return [path]
    return sorted(config.parent for config in path.glob("*/config.yaml"))


def compare(run_dirs: Sequence[Path]) -> Comparison:
    """Compare runs; the first one's group is what the others are compared with."""
    groups = group_runs([read_run(path) for path in run_dirs])
    names = sorted({name for group in groups for run in group.runs for name in figures_of(run)})
    figures = {name: [compare_figure(name, groups[0], group) for group in groups] for name in names}
    costs = costs_of(groups)
    return Comparison(groups, config_differences(groups), figures, costs)


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
    """The configuration without what only says where the run is and how it looks."""
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
    return ", ".join(dict.fromkeys(words_of(value) for value in values))


def figures_of(run: Run) -> dict[str, float]:
    """The final figures, without the times; of an unfinished run its newest metrics."""
    figures = {name: value for name, value in run.figures.items() if value is not None}
    if not run.figures:
        figures = {name: value for row in run.rows for name, value in row.items()}
    return {name: value for name, value in figures.items() if is_result(name)}


def compare_figure(
    name: str, first: Group, group: Group
) -> tuple[Estimate | None, Difference | None]:
    """A figure of a group, and its difference from the first group; None where it is absent."""
    base, values = first.values(name), group.values(name)
    if not values:
        return None, None
    value = estimate(list(values.values()))
    if group is first or not base:
        return value, None
    return value, difference(base, values)


def difference(base: Mapping[Any, float], values: Mapping[Any, float]) -> Difference:
    """``values`` minus ``base``, both by seed: paired if the seeds are the same."""
    if base.keys() == values.keys():
        return Difference(estimate([values[seed] - base[seed] for seed in base]), len(base) > 1)
    one, other = list(base.values()), list(values.values())
    return Difference(difference_of_means(one, other), False)


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
    costs = {
        "ranks": [str(number or "?") for number in ranks],
        "epochs": [_words(run.num_epochs for run in group.runs) for group in groups],
        "steps": [_words(run.num_steps for run in group.runs) for group in groups],
    }
    epoch_s = [mean_of([run.figures.get("time/epoch_s") for run in g.runs]) for g in groups]
    total_s = [mean_of([run.figures.get("time/total_s") for run in g.runs]) for g in groups]
    costs["seconds of training"] = [show_or_not(value) for value in total_s]
    costs["seconds per epoch, median"] = [show_or_not(value) for value in epoch_s]
    for name in sorted({name for g in groups for run in g.runs for name in run.speeds}):
        values = [mean_of([run.speeds.get(name) for run in g.runs]) for g in groups]
        costs[name] = [show_or_not(value) for value in values]
    if len(set(ranks)) > 1:
        pairs = [speedup(epoch_s[0], ranks[0], *own) for own in zip(epoch_s, ranks, strict=True)]
        costs["speedup"] = [show_or_not(pair[0]) for pair in pairs]
        costs["scaling efficiency"] = ["" if e is None else f"{e:.0%}" for _, e in pairs]
    return costs


def speedup(
    base_s: float | None, base_ranks: int | None, own_s: float | None, own_ranks: int | None
) -> tuple[float | None, float | None]:
    """How many times faster an epoch is than the first group's, and that per added rank.

    The efficiency is 1 if twice the ranks take half the time.
    """
    if not base_s or not own_s:
        return None, None
    faster = base_s / own_s
    if not base_ranks or not own_ranks:
        return faster, None
    return faster, faster * base_ranks / own_ranks


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def show_or_not(value: float | None) -> str:
    """A figure, or nothing where it is not known."""
    return "" if value is None else show(value)


def agreement(comparison: Comparison) -> list[str]:
    """For each group after the first one, in words: which figures differ beyond the noise."""
    first = comparison.groups[0].name
    sentences = []
    for index, group in enumerate(comparison.groups[1:], 1):
        gaps = {name: cells[index][1] for name, cells in comparison.figures.items()}
        known = {
            name: gap.estimate
            for name, gap in gaps.items()
            if gap and gap.estimate.half_width is not None
        }
        apart = [name for name, gap in known.items() if abs(gap.mean) > (gap.half_width or 0)]
        text = f"{len(known) - len(apart)} of {len(known)} figures agree with {first} within their "
        text += f"95 % intervals{'; not ' if apart else ''}{', '.join(apart)}"
        if not any(gaps.values()):
            text = f"it has no figure in common with {first}"
        elif not known:
            text = "the noise of the seed is not known; train several seeds, as -m seed=0,1,2 does"
        sentences.append(f"{group.name}: {text}")
    return sentences


def to_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain containers."""
    return {
        "groups": [
            {"name": group.name, "runs": [str(run.run_dir) for run in group.runs]}
            for group in comparison.groups
        ],
        "configuration": comparison.differences,
        "figures": {
            name: [
                {"value": value and _plain(value),
                 "difference": gap and {**_plain(gap.estimate), "paired": gap.is_paired}}
                for value, gap in cells
            ]
            for name, cells in comparison.figures.items()
        },
        "agreement": agreement(comparison),
        "costs": comparison.costs,
    }  # fmt: skip


def _plain(value: Estimate) -> dict[str, Any]:
    return {"mean": value.mean, "interval95": value.half_width, "n": value.num}


def tables(comparison: Comparison) -> dict[str, list[list[str]]]:
    """The tables of the comparison by their titles, each with its heading first."""
    names = [group.name for group in comparison.groups]
    found = {}
    if comparison.differences:
        rows = [[key, *values] for key, values in comparison.differences.items()]
        found["Configuration: what differs"] = [["key", *names], *rows]
    figures = [
        [name, *("" if value is None else str(value) for value, _ in cells),
         *("" if gap is None else str(gap) for _, gap in cells[1:])]
        for name, cells in comparison.figures.items()
    ]  # fmt: skip
    heading = ["figure", *names, *(f"{name} - {names[0]}" for name in names[1:])]
    found["Final figures, and differences from the first"] = [heading, *figures]
    costs = [[name, *values] for name, values in comparison.costs.items()]
    found["Time and speed"] = [["", *names], *costs]
    return found


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
            table.add_row(*map(Text, row))  # as text: a name may look like rich's markup
        console.print(table)
    for sentence in agreement(comparison):
        console.print(Text(sentence))


def to_page(comparison: Comparison) -> str:
    """The comparison as one page, with the curves of all runs over each other."""
    from samestep.report import charts  # imports matplotlib

    runs = [run for group in comparison.groups for run in group.runs]
    curves: dict[tuple[str, str], dict[str, charts.Points]] = {}
    for run in runs:
        for axis, columns in charts.curves_of(run.rows).values():
            for name, points in columns.items():
                curves.setdefault((name, axis), {})[run.name] = points
    problems = [f"{run.name}: {problem}" for run in runs for problem in run.problems]
    return render(
        "compare.html",
        title=" and ".join(group.name for group in comparison.groups),
        tables=tables(comparison),
        agreement=agreement(comparison),
        charts=[charts.draw(name, each, axis) for (name, axis), each in curves.items()],
        problems=problems,
    )
