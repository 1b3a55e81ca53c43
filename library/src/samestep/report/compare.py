"""Compare runs: configuration, final metrics, time and speed.

samestep compare runs/one runs/two
samestep compare runs/mine-*
samestep compare runs/seeds runs/other-seeds --json

A path may also be a folder of runs, such as one of a sweep. Finished runs that differ only in the
seed are repeats: their mean is shown, with its 95 % confidence interval. A second run of the same
seed and an unfinished run have a column of their own. `samestep report --serve` draws the curves.
"""

import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.command_line import Parser, find_run
from samestep.errors import ConfigError
from samestep.ranks import environment
from samestep.report import charts
from samestep.report.estimates import BySeed, estimate_difference, estimate_mean
from samestep.report.files import Run, read_run, show, show_value
from samestep.report.tables import Cell, Tables, as_json, print_tables
from samestep.run import metrics, record

SEED = re.compile(r"(.+\.)?seed")
DIRECTIONS = {"max": 1, "min": -1}
LESS_IS_BETTER = {"loss", "error", "mae", "mse", "rmse", "perplexity", "time"}
TIMES = ("time/total_s", "time/epoch_s")
ROUNDING = 1e-6  # relative; two sums in another order differ by less
MACHINE = ("hostname", "cpu", "cpu_cores", "gpus")  # what decides the speed of a run
MAX_NAMED = 3  # settings in the name of a group
LOAD = 0.25  # of each core; with a larger difference, other programs may explain a speed


Group = dict[str, Run]
"""Runs that repeat each other, by their seeds."""


def main(argv: Sequence[str]) -> int:
    """Print the comparison of several runs."""
    parser = Parser("samestep compare", __doc__)
    parser.usage = f"{parser.prog} [options] run run [run ...]"
    text = "run directories, or folders of runs; or their names in runs"
    parser.add_argument("runs", nargs="+", type=find_run, help=text)
    parser.add_json()
    arguments = parser.parse(argv)
    environment.limit_threads()
    runs = list(map(read_run, find_runs(arguments.runs)))
    tables = compare(runs)
    if arguments.json:
        print(json.dumps(as_json(tables), indent=2))
    else:
        print_problems(runs)
        print_tables(tables)
    return 0


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run directories of paths, which may be folders that hold several runs.

    Raises:
        ConfigError: if there is no run at one of the paths, or only one run in all.
    """
    # A dict is a set with an order: the first run is what the others are compared with.
    found: dict[Path, None] = {}
    for path in paths:
        configs = list(path.glob("config.yaml")) or sorted(path.glob("*/config.yaml"))
        if not configs:
            raise ConfigError(f"{path}: no such run; name directories such as runs/<id>")
        for config in configs:
            # Resolved, so that a link or another spelling does not compare a run with itself.
            found[config.parent.resolve()] = None
    if len(found) < 2:
        raise ConfigError(f"{next(iter(found))} is one run; name at least two of them")
    return list(found)


def compare(runs: Sequence[Run]) -> Tables:
    """Compare runs with the first one.

    Finished runs whose configurations differ only in the seed make one group, and every other run
    is a group of its own. Groups are compared by the difference of their means, or, if both have
    the same seeds, by the mean of the differences of each seed.
    """
    groups = group_runs(runs)
    names = names_of(groups)
    heading = [Cell(), *map(Cell, names)]
    gaps = [Cell(f"{name} - {names[0]}") for name in names[1:]]
    nothing = [[Cell("nothing"), *[Cell()] * len(groups)]]
    return {
        "Runs": [heading, *rows_of_facts(groups)],
        # An empty table could also mean that no configuration was read.
        "Configuration: what differs": [heading, *(rows_of_differences(groups) or nothing)],
        "Final metrics": [heading + gaps, *rows_of_metrics(groups, runs)],
    }


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Put repeats together: runs that differ only in the seed, in order of their first run.

    A second run of the same configuration and seed is not a repeat, because equal seeds share their
    noise: it gets a group of its own. So runs of changed code are compared with each other.
    """
    groups: dict[str, Group] = {}
    for run in runs:
        seeds, key = identify(run)
        # The key gets longer until it names a group that lacks this seed.
        while seeds in groups.get(key, {}):
            key += " again"
        groups.setdefault(key, {})[seeds] = run
    return list(groups.values())


def identify(run: Run) -> tuple[str, str]:
    """The seeds of a run, and what it has in common with its repeats."""
    seeds, others = split_seeds(run.values, run.status)
    # Without final metrics or configuration it is not known what the run would repeat.
    if not run.config or not run.final_metrics:
        return seeds, str(run.run_dir)
    return seeds, others


def split_seeds(values: Mapping[str, Any], status: record.Record) -> tuple[str, str]:
    """The seeds of a run, and the rest of what decides its results, of its configuration."""
    seeds = []
    others = []
    for key, value in sorted(values.items()):
        # A data set or a sampler may have a seed of its own, such as data.seed.
        if SEED.fullmatch(key):
            seeds.append((key, value))
        else:
            others.append((key, value))
    # More ranks make the same steps in another time, which the mean of a group would hide.
    return str(seeds), f"{others} {status.start.get('world_size')}"


def names_of(groups: Sequence[Group]) -> list[str]:
    """A name for each group: of one run its own, of several the settings that no other group has.

    The name of a run often has its seed, as in a grid, and the group has others.
    """
    rows = [row for row in rows_of_differences(groups) if not SEED.fullmatch(row[0])]
    settings = []
    for number in range(1, len(groups) + 1):
        # More would not fit into a heading; the table of differences has all.
        texts = [f"{row[0].rpartition('.')[2]}={row[number]}" for row in rows[:MAX_NAMED]]
        settings.append(", ".join(texts))
    # Without a difference all groups have this one.
    known = ["", *settings]
    return [name_of(group, own, known) for group, own in zip(groups, settings, strict=True)]


def name_of(group: Group, settings: str, known: Sequence[str]) -> str:
    """The name of a group, of which no other has the ``settings`` if they are ``known`` once."""
    first = next(iter(group.values()))
    if not first.final_metrics:
        return f"{first.name} ({first.status.state}, newest metrics)"
    if len(group) > 1:
        return f"{settings if known.count(settings) == 1 else first.name} (n = {len(group)})"
    return first.name


def rows_of_facts(groups: Sequence[Group]) -> list[list[Cell]]:
    """The facts of each group; a row without any, such as the notes, is left out."""
    known = []
    for row in make_rows(groups, facts_of):
        if any(row[1:]):
            known.append(row)
    return known


def rows_of_differences(groups: Sequence[Group]) -> list[list[Cell]]:
    """The values of the configuration that are not the same in all groups, sorted by their keys."""
    different = []
    for row in make_rows(groups, lambda run: run.values):
        _, *cells = row
        if len(set(cells)) > 1:
            different.append(row)
    return sorted(different)


def rows_of_metrics(groups: Sequence[Group], runs: Sequence[Run]) -> list[list[Cell]]:
    """The metrics of each group, and their differences from the first group."""
    values: dict[str, list[dict[str, float]]] = {}
    for number, group in enumerate(groups):
        for seeds, run in group.items():
            for name, value in metrics_of(run).items():
                if name not in values:
                    values[name] = [{} for _ in groups]
                values[name][number][seeds] = value
    rows = []
    # What was learned comes first, then what it cost.
    for name in sorted(values, key=lambda name: (is_cost(name), name)):
        directions = [direction_of(name, runs)] * len(groups)
        if is_cost(name):
            for number, group in enumerate(groups):
                if not have_equal_machines([*group.values(), *groups[0].values()]):
                    directions[number] = 0
        rows.append(compare_metric(name, values[name], directions))
    return rows


def have_equal_machines(runs: Sequence[Run]) -> bool:
    """Whether all starts of all runs are known to be on one kind of machine, equally loaded."""
    machines = set()
    loads = []
    for run in runs:
        for start in run.status.starts:
            machines.add(str([start.get(key) for key in MACHINE]))
            loads.append(load_of(start))
    # A record of an older version has no load, and then nothing is known.
    if len(machines) != 1 or any(map(math.isnan, loads)):
        return False
    return max(loads) - min(loads) <= LOAD


def load_of(start: Mapping[str, Any]) -> float:
    """How many programs waited for each core when the run started; nan if that is not known."""
    try:
        return float(start["load"]) / int(start["cpu_cores"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return math.nan


def is_cost(name: str) -> bool:
    """Whether a metric is a time or a speed."""
    return name in TIMES or name.endswith("/s")


def facts_of(run: Run) -> dict[str, Any]:
    """What a reader must know of a run before its metrics."""
    return {
        "runs": run.name,
        "state": run.status.state,
        "seeds": run.values.get("seed", "?"),
        "tags": ", ".join(map(str, run.status.tags)),
        "notes": run.status.notes,
        "ranks": run.status.start.get("world_size", "?"),
        "machine": describe_machine(run.status.start),
        "epochs": metrics.count_epochs(run.rows),
        "steps": metrics.count_steps(run.rows),
    }


def describe_machine(start: Mapping[str, Any]) -> str:
    """The machine of a start, and how busy it was; empty if that is not known."""
    load = load_of(start)
    if math.isnan(load):
        return str(start.get("hostname", ""))
    return f"{start.get('hostname')}, {load:.0%} busy at the start"


def make_rows(
    groups: Sequence[Group], describe: Callable[[Run], dict[str, Any]]
) -> list[list[Cell]]:
    """A row for each key that describes a run, and in the row a cell for each group.

    Args:
        groups: of runs.
        describe: gives values of a run by their keys; a missing one is shown as absent.
    """
    described = []
    keys: dict[str, None] = {}
    for group in groups:
        of_group = list(map(describe, group.values()))
        described.append(of_group)
        for values in of_group:
            keys |= dict.fromkeys(values)
    rows = []
    for key in keys:
        row = [Cell(key)]
        for of_group in described:
            row.append(join(values.get(key, "absent") for values in of_group))
        rows.append(row)
    return rows


def join(values: Iterable[Any]) -> Cell:
    """Equal values once, different ones in a row, such as the seeds of repeats."""
    texts = dict.fromkeys(map(show_value, values))
    return Cell(", ".join(filter(None, texts)))


def metrics_of(run: Run) -> dict[str, float]:
    """The final metrics and speeds; of an unfinished run the newest value of each metric."""
    found = dict(run.final_metrics)
    if not found:
        # Rows are in order of their steps, so the newest value of each column stays.
        for row in run.rows:
            found |= row
    found |= metrics.speeds(run.rows)
    compared = {}
    for name, value in found.items():
        # The memory and the cores in use say little about which run is better.
        is_compared = metrics.is_result(name) or name in TIMES
        if is_compared and math.isfinite(value):
            compared[name] = value
    return compared


def direction_of(name: str, runs: Sequence[Run]) -> int:
    """1 if more of a metric is better, -1 if less is, 0 if that is not known.

    The mode of a monitored metric also applies to metrics that contain its name.
    """
    words = set(re.split("[/_]", name))
    for run in runs:
        # val/score with mode max tells that more of test/score is better too.
        monitored = re.split("[/_]", charts.title_of(run.status.monitor))
        if run.status.mode in DIRECTIONS and words.issuperset(monitored):
            return DIRECTIONS[run.status.mode]
    if name.endswith("/s"):
        return 1
    if words & LESS_IS_BETTER:
        return -1
    return 0


def compare_metric(name: str, groups: Sequence[BySeed], directions: Sequence[int]) -> list[Cell]:
    """A row: the metric in each group, the best mean, and differences from the first group.

    Args:
        name: of the metric.
        groups: the values of each group.
        directions: for each group, see ``direction_of``; 0 if it cannot be judged.
    """
    cells = [mean_of(values) for values in groups]
    mark_extreme(cells, min(directions, key=abs))
    row = [Cell(name), *cells]
    for values, direction in zip(groups[1:], directions[1:], strict=True):
        gap = Cell.of(estimate_difference(values, groups[0]), is_difference=True)
        mark_difference(gap, direction, scale=largest_of(values, groups[0]))
        row.append(gap)
    return row


def mean_of(values: BySeed) -> Cell:
    """The mean of a group with its interval; of two values, whose interval says little, both."""
    cell = Cell.of(estimate_mean(values))
    if len(values) != 2:
        return cell
    texts = " and ".join(map(show, values.values()))
    both = Cell(f"{show(statistics.fmean(values.values()))} ({texts})")
    both.estimate = cell.estimate
    return both


def largest_of(*groups: BySeed) -> float:
    """The largest size of a value."""
    largest = 0.0
    for values in groups:
        for value in values.values():
            largest = max(largest, abs(value))
    return largest


def mark_extreme(cells: Sequence[Cell], direction: int) -> None:
    """Mark the highest mean, or the lowest if less is better, unless all of them are equal.

    The mark says what the table shows and no more: the highest value may be chance.
    """
    scores: dict[int, float] = {}
    for number, cell in enumerate(cells):
        if cell.estimate is not None:
            scores[number] = direction * cell.estimate.mean
    best = max(scores.values())
    rounding = ROUNDING * abs(best)
    if best - min(scores.values()) <= rounding:
        return
    for number, score in scores.items():
        if best - score <= rounding:
            cells[number].mark = "highest" if direction > 0 else "lowest"


def mark_difference(cell: Cell, direction: int, scale: float) -> None:
    """Mark a difference from the first group as better or worse, if chance does not explain it.

    Args:
        cell: of the difference.
        direction: see ``direction_of``.
        scale: the size of the compared values.
    """
    # Without an interval it is not known how far two equal runs would differ.
    if cell.estimate is None or cell.estimate.interval95 is None:
        return
    # 0 if it is not known which direction is the better one.
    gain = direction * cell.estimate.mean
    # Both limits: equal differences of all seeds have an interval of zero.
    if abs(gain) <= max(cell.estimate.interval95, ROUNDING * scale):
        return
    cell.mark = "better" if gain > 0 else "worse"


def print_problems(runs: Sequence[Run]) -> None:
    """Say on stderr which files of which runs are missing or damaged."""
    for run in runs:
        for problem in run.problems:
            print(f"{run.name}: {problem}", file=sys.stderr)
