"""The list of runs for the live page: what differs between them, and repeats with their mean."""

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from samestep.config_keys import KeyScope, scope_of
from samestep.errors import ConfigError
from samestep.report import compare, grids, listing
from samestep.report.estimates import estimate_mean
from samestep.report.files import Run, Stamp, show_value, stamp_of
from samestep.run import record
from samestep.run.changes import read_config
from samestep.run_spec import select

MAX_COLUMNS = 8  # of what differs
MAX_CACHED = 2000  # configurations


def describe_runs(folder: Path, found: Mapping[str, record.Record]) -> dict[str, Any]:
    """The runs of a folder, as the page lists them.

    Args:
        folder: of the runs.
        found: their records, in the order of the list.

    Returns:
        ``columns``: the keys of the configuration that differ. ``runs``: for each run its name,
        state, best value, progress, tags, grid and values of these keys, and in ``mean`` the mean
        of its repeats, whose names are in ``repeats``.
    """
    # The record of a run is small and always read anew; a configuration is neither.
    known = {name: read_known(folder / name) for name in found}
    columns = choose_columns(known, found)
    grid_of: dict[str, str] = {}
    for grid in grids.find_grids(folder, found).values():
        grid_of |= dict.fromkeys(grid.records, grid.name)
    groups = group_repeats(known, found)
    runs = []
    for name, status in found.items():
        _, state, best, epochs, _, time = listing.describe(name, status)
        values = {}
        for key in columns:
            values[key] = value_of(known[name], key)
        names, mean = groups.get(name, ([], ""))
        runs.append(
            {
                "name": name, "state": state, "best": status.best, "shown_best": best,
                "monitor": status.monitor, "mode": status.mode, "epochs": epochs,
                "tags": list(map(str, status.tags)), "grid": grid_of.get(name, ""),
                "time": time, "values": values, "repeats": names, "mean": mean,
            }
        )  # fmt: skip
    return {"columns": columns, "runs": runs}


class Known(NamedTuple):
    """The configuration of a run."""

    config: dict[str, Any]
    values: dict[str, Any]  # by full keys, see ``Run.values``


def read_known(run_dir: Path) -> Known:
    """The configuration of a run; empty if it cannot be read."""
    return read_unchanged(run_dir, stamp_of(run_dir / "config.yaml"))


@lru_cache(maxsize=MAX_CACHED)
def read_unchanged(run_dir: Path, stamp: Stamp) -> Known:
    """The configuration of a run, read again only if its file has another stamp."""
    try:
        config = read_config(run_dir)
    except (ConfigError, OSError):
        config = {}
    run = Run(run_dir, config, {}, [], record.Record(), [])
    return Known(config, run.values)


def choose_columns(known: Mapping[str, Known], found: Mapping[str, record.Record]) -> list[str]:
    """The keys that differ: those that were set for one of the runs, otherwise any."""
    # A Counter keeps the order in which keys were met.
    num_set: Counter[str] = Counter()
    for status in found.values():
        num_set.update(list(status.start.get("overridden") or {}))
    num_known: Counter[str] = Counter()
    for run in known.values():
        num_known.update(list(run.values))
    for counts in (num_set, num_known):
        # Names, paths and display options differ between all runs.
        differing = [key for key in counts if is_column(key, known)]
        if differing:
            # In a folder of many experiments, a key of a single run must not hide the seed.
            differing.sort(key=lambda key: (-counts[key], key))
            return differing[:MAX_COLUMNS]
    return []


def is_column(key: str, known: Mapping[str, Known]) -> bool:
    """Whether runs have several values of a key."""
    if scope_of(key) >= KeyScope.COSMETIC:
        return False
    # Runs of another program do not have the key, which says nothing about the others.
    values = {value_of(run, key) for run in known.values()}
    return len(values - {""}) > 1


def value_of(run: Known, key: str) -> str:
    """The value of a key; of a group of the configuration, the choice."""
    choice = select(run.config, f"choices.{key.replace('.', '/')}")
    value = choice or select(run.config, key)
    return "" if value is None else show_value(value)


def group_repeats(
    known: Mapping[str, Known], found: Mapping[str, record.Record]
) -> dict[str, tuple[list[str], str]]:
    """For each finished run that has repeats, their names and the mean of their best values.

    Repeats differ in their seeds only. A run is one of its own, and a second one of the same seed
    is none: equal seeds share their noise.
    """
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for name, status in found.items():
        # The best value of a run that is not over may still improve.
        if status.state == record.FINISHED and status.best is not None:
            seeds, others = compare.split_seeds(known[name].values, status)
            # Of one seed the newest, which comes first.
            groups.setdefault((others, status.monitor), {}).setdefault(seeds, name)
    repeats: dict[str, tuple[list[str], str]] = {}
    for by_seed in groups.values():
        names = [*by_seed.values()]
        if len(names) > 1:
            repeats |= dict.fromkeys(names, (names, show_mean(names, found)))
    return repeats


def show_mean(names: list[str], found: Mapping[str, record.Record]) -> str:
    """The mean of the best values of repeats, with its interval."""
    values = {}
    for name in names:
        best = found[name].best
        assert best is not None
        values[name] = float(best)
    estimate = estimate_mean(values)
    return f"{estimate.text()} (n = {estimate.n})" if estimate else ""
