"""The grids of a folder of runs: one line each in the list, and a table of what each has found."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from samestep.errors import ConfigError
from samestep.grid import jobs
from samestep.report.charts import title_of
from samestep.report.compare import SEED, direction_of, mark_extreme
from samestep.report.estimates import estimate_mean
from samestep.report.files import Run, read_run
from samestep.report.tables import Cell, Tables
from samestep.run import metrics, record

TIME = "time/total_s"


class Grid:
    """A grid as far as it can be read.

    Args:
        folder: of the grid.
        records: of all runs in the folder of runs, by their names.
    """

    def __init__(self, folder: Path, records: Mapping[str, record.Record]) -> None:
        self.folder = folder
        self.name = folder.name
        self.values = jobs.read_jobs(folder)
        self.records: dict[str, record.Record] = {}
        for run_id in self.values:
            if run_id in records:
                self.records[run_id] = records[run_id]

    @property
    def finished(self) -> list[str]:
        """The runs that are finished."""
        names = []
        for name, status in self.records.items():
            if status.state == record.FINISHED:
                names.append(name)
        return names

    def state(self) -> str:
        """How many runs are finished, and how many are in other states."""
        counts: dict[str, int] = {}
        for run_id in self.values:
            status = self.records.get(run_id)
            if status is None:
                # Its configuration may have been rejected, or it has not begun.
                state = "missing"
                if jobs.read_outcome(self.folder, run_id).why:
                    state = record.FAILED
            else:
                state = status.state
            counts[state] = counts.get(state, 0) + 1
        text = f"{counts.pop(record.FINISHED, 0)} of {len(self.values)} finished"
        for state in sorted(counts):
            text += f", {counts[state]} {state}"
        return text

    def best(self) -> record.Record | None:
        """The record of the run with the best value, if all have the same monitor."""
        statuses = []
        goals = set()
        for status in self.records.values():
            if status.best is not None:
                statuses.append(status)
                goals.add((status.monitor, status.mode))
        # Values of different metrics cannot be compared.
        if len(goals) != 1:
            return None
        choose = min if statuses[0].mode == "min" else max
        return choose(statuses, key=lambda status: status.best or 0)


def find_grids(folder: Path, records: Mapping[str, record.Record]) -> dict[str, Grid]:
    """The grids in a folder of runs by their names."""
    grids = {}
    for path in sorted((folder / jobs.FOLDER).glob(f"*/{jobs.JOBS}")):
        grid = Grid(path.parent, records)
        if grid.records:
            grids[grid.name] = grid
    return grids


def find_grid(folder: Path, name: str, records: Mapping[str, record.Record]) -> Grid:
    """The grid of this name.

    Raises:
        ConfigError: if there is none with a run.
    """
    grids = find_grids(folder, records)
    if name not in grids:
        names = ", ".join(grids) or "none"
        raise ConfigError(f"--grid {name}: {folder} has no such grid with a run; it has {names}")
    return grids[name]


def compare_values(grid: Grid) -> Tables:
    """A row for each combination of values, over its seeds: the mean of what was monitored.

    Only finished runs count.
    """
    keys, groups = group_by_values(grid.values)
    runs = {}
    for run_id in grid.finished:
        runs[run_id] = read_run(grid.folder.parent.parent / run_id)
    names = choose_metrics([*runs.values()])
    rows = []
    for combination, run_ids in groups.items():
        finished = [runs[run_id] for run_id in run_ids if run_id in runs]
        values = dict(combination)
        row = [Cell(values.get(key, "")) for key in keys]
        row.append(Cell(count_of(len(finished), len(run_ids))))
        rows.append([*row, *estimate_metrics(finished, names)])
    # Behind the values and the number of runs.
    for column, name in enumerate(names, start=len(keys) + 1):
        cells = [row[column] for row in rows if row[column].estimate]
        if cells:
            mark_extreme(cells, direction_of(name, [*runs.values()]))
    heading = list(map(Cell, (*keys, "runs", *names)))
    return {f"Grid {grid.name}": [heading, *rows]}


Combination = tuple[tuple[str, str], ...]
"""Keys and values, sorted by the keys."""


def group_by_values(
    values_of: Mapping[str, Mapping[str, str]],
) -> tuple[list[str], dict[Combination, list[str]]]:
    """The keys of a grid without its seeds, and the runs that differ in their seeds alone."""
    # A dict keeps the order in which the keys were typed.
    keys: dict[str, None] = {}
    groups: dict[Combination, list[str]] = {}
    for run_id, values in values_of.items():
        others = {}
        for key, value in values.items():
            if not SEED.fullmatch(key):
                others[key] = value
        keys |= dict.fromkeys(others)
        groups.setdefault(tuple(sorted(others.items())), []).append(run_id)
    return [*keys], groups


def estimate_metrics(runs: Sequence[Run], names: Sequence[str]) -> list[Cell]:
    """The mean of each metric over these runs, without the runs that do not have it."""
    cells = []
    for name in names:
        found = {}
        for run in runs:
            value = value_of(run, name)
            if value is not None:
                found[run.name] = value
        cells.append(Cell.of(estimate_mean(found)))
    return cells


def count_of(finished: int, total: int) -> str:
    """How many runs count in a row."""
    return str(total) if finished == total else f"{finished} of {total}"


def choose_metrics(runs: Sequence[Run]) -> list[str]:
    """What the runs monitored, its value in the test, the test loss, and the time."""
    names: dict[str, None] = {}
    for run in runs:
        title = title_of(run.status.monitor)
        if run.status.monitor:
            names[run.status.monitor] = None
        for name in run.final_metrics:
            tested = re.sub(r"^test[/_]|[/_]test$", "", name)
            if metrics.is_of_test(name) and tested in (title, "loss"):
                names[name] = None
        if TIME in run.final_metrics:
            names[TIME] = None
    # Of runs with several monitors, the time still comes last.
    return sorted(names, key=lambda name: name == TIME)


def value_of(run: Run, name: str) -> float | None:
    """A final metric of a run; of what it monitors, the best value."""
    if name == run.status.monitor:
        return run.status.best
    return run.final_metrics.get(name)
