"""List the runs of a folder: their state, their best value, and when they were last seen.

samestep runs
samestep runs /volume/runs
samestep runs --grid mine      # the runs of a grid, and a table of what its values have done
samestep runs --time           # where the wall time of each run went, and of all of them
samestep runs --json

A grid, which `python train.py -m` trains, is one line. Its table has, for each combination of
values, the mean over its seeds and half of the 95 % confidence interval.
"""

import itertools
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from samestep.command_line import Parser
from samestep.errors import ConfigError
from samestep.report import grids, wall_time
from samestep.report.files import show
from samestep.report.tables import print_tables
from samestep.run import record

HEADING = ("run", "state", "best", "epochs", "tags", "seen")
WHY_WIDTH = 60  # characters of a reason
LEAST = (
    ("state", 20),
    ("seen", 16),
    ("tags", 0),
    ("state", 8),
    ("best", 9),
    ("epochs", 0),
    ("run", 24),
    ("seen", 10),
    (wall_time.PARTS, 9),
    ("run", 10),
    ("best", 6),
)
"""Columns in the order in which they are cut on a narrow terminal, and to what width at least."""
ELLIPSIS = "..."
TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d.*")


def main(argv: Sequence[str]) -> int:
    """Print the list of runs."""
    parser = Parser("samestep runs", __doc__)
    text = "folder of the runs; default: runs"
    parser.add_argument("folder", nargs="?", default="runs", type=Path, help=text)
    parser.add_json()
    text = "the runs of one grid, each on a line; default: all runs, each grid on a line"
    parser.add_argument("--grid", metavar="NAME", help=text)
    text = "seconds of each run, and percent of training, validation, saving and so on"
    parser.add_argument("--time", action="store_true", help=text)
    arguments = parser.parse(argv)
    found = list_runs(arguments.folder)
    if arguments.time:
        if arguments.grid is not None:
            found = grids.find_grid(arguments.folder, arguments.grid, found).records
        print_times(arguments.folder, found, as_plain=arguments.json)
    elif arguments.grid is not None:
        grid = grids.find_grid(arguments.folder, arguments.grid, found)
        print_grid(grid, as_plain=arguments.json)
    elif arguments.json:
        print(json.dumps(plain_runs(found), indent=2))
    elif not found:
        print(f"There is no run in {arguments.folder}.")
    else:
        print_table(fold_grids(found, grids.find_grids(arguments.folder, found)))
    return 0


def print_grid(grid: grids.Grid, *, as_plain: bool) -> None:
    """Print the runs of a grid, and the table of its values."""
    tables = grids.compare_values(grid)
    if as_plain:
        (rows,) = tables.values()
        heading, *cells = rows
        values = []
        for row in cells:
            plain = [cell.plain() for cell in row]
            values.append(dict(zip(heading, plain, strict=True)))
        print(json.dumps({"runs": plain_runs(grid.records), "values": values}, indent=2))
        return
    print_table(rows_of(grid.records))
    print()
    print_tables(tables)


def print_times(folder: Path, found: dict[str, record.Record], *, as_plain: bool) -> None:
    """Print the account of each run, and of all together; causes in percent of the seconds."""
    accounts = {}
    for name, status in found.items():
        accounts[name] = wall_time.account_of(folder / name, status)
    total = wall_time.add_up(accounts.values())
    if as_plain:
        runs = [{"name": name} | account.plain() for name, account in accounts.items()]
        print(json.dumps({"runs": runs, "total": total.plain()}, indent=2))
        return
    shown = [*accounts.items(), ("all", total)]
    rows = [wall_time.HEADING, *itertools.starmap(wall_time.cells_of, shown)]
    if sys.stdout.isatty() and width_of(rows) > shutil.get_terminal_size().columns:
        rows = [wall_time.NARROW_HEADING, *itertools.starmap(wall_time.narrow_cells_of, shown)]
    print_columns(rows)


def plain_runs(found: dict[str, record.Record]) -> list[dict[str, Any]]:
    """The runs for a program."""
    return [{"name": name} | status._asdict() for name, status in found.items()]


def list_runs(
    folder: Path, read: Callable[[Path], record.Record] = record.read
) -> dict[str, record.Record]:
    """The runs of a folder by their names, the newest first; other folders in it are left out.

    Args:
        folder: of the runs.
        read: the record of a run directory.

    Raises:
        ConfigError: if there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name the run_root of your runs")
    found = {}
    for path in folder.iterdir():
        # Only this small file of each run is read, so that ten thousand runs take two seconds.
        status = read(path)
        # A run whose run.json is lost or damaged still has its configuration.
        if status.time or (path / "config.yaml").exists():
            found[path.name] = status
    return dict(sorted(found.items(), key=newest_first))


def newest_first(item: tuple[str, record.Record]) -> tuple[float, str]:
    """The sort key of a run in a list: by its time, and by name among equal times."""
    name, status = item
    return -record.timestamp(status.time), name


def fold_grids(
    found: dict[str, record.Record], known: dict[str, grids.Grid]
) -> list[tuple[str, ...]]:
    """The cells of each run, with one line for a grid where the newest of its runs would be."""
    grid_of: dict[str, grids.Grid] = {}
    for grid in known.values():
        grid_of |= dict.fromkeys(grid.records, grid)
    rows = []
    folded = set()
    for name, status in found.items():
        if name not in grid_of:
            rows.append(describe(name, status))
        elif grid_of[name].name not in folded:
            folded.add(grid_of[name].name)
            rows.append(describe_grid(grid_of[name], status.time))
    return rows


def describe_grid(grid: grids.Grid, time: str) -> tuple[str, ...]:
    """The cells of a grid, one for each column of ``HEADING``."""
    best = show_best(grid.best())
    return f"{grid.name} (grid)", grid.state(), best, "", "", time.replace("T", " ")


def print_table(cells: Sequence[tuple[str, ...]]) -> None:
    """Print these lines under the heading."""
    print_columns([HEADING, *cells])


def print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    """Print these lines in columns; on a terminal, as wide as it is. The first is the heading."""
    widths = widths_of(rows)
    if sys.stdout.isatty():
        widths = shrink(rows[0], widths, shutil.get_terminal_size().columns)
    for row in rows:
        # rich would need a quarter of a second for its import, and breaks lines in narrow windows.
        texts = []
        for text, width in zip(row, widths, strict=True):
            # A column without a width is left out.
            if width:
                texts.append(cut(text, width).ljust(width))
        print("  ".join(texts).rstrip())


def widths_of(rows: Sequence[tuple[str, ...]]) -> list[int]:
    """The width of each column."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def width_of(rows: Sequence[tuple[str, ...]]) -> int:
    """The width of these lines in columns, with two spaces between two columns."""
    widths = widths_of(rows)
    return sum(widths) + 2 * (len(widths) - 1)


def shrink(heading: Sequence[str], widths: Sequence[int], columns: int) -> list[int]:
    """Widths with which a line fits into ``columns``; what matters least is cut first."""
    narrow = list(widths)
    for name, least in LEAST:
        if name not in heading:
            continue
        number = heading.index(name)
        # Two spaces between two columns.
        gaps = 2 * (len(narrow) - narrow.count(0) - 1)
        excess = sum(narrow) + gaps - columns
        if excess > 0:
            narrow[number] = min(narrow[number], max(least, narrow[number] - excess))
    return narrow


def cut(text: str, width: int) -> str:
    """The text in at most ``width`` characters, with an ellipsis if a part is missing."""
    if len(text) <= width:
        return text
    # Of a time the zone and the seconds are cut, and an ellipsis would cut more.
    if width < len(ELLIPSIS) or TIME.fullmatch(text):
        return text[:width]
    state, colon, _ = text.partition(": ")
    if colon and len(state) <= width < len(state + colon + ELLIPSIS):
        return state
    return text[: width - len(ELLIPSIS)] + ELLIPSIS


def rows_of(found: dict[str, record.Record]) -> list[tuple[str, ...]]:
    """The cells of each run."""
    return list(itertools.starmap(describe, found.items()))


def describe(name: str, status: record.Record) -> tuple[str, ...]:
    """The cells of a run, one for each column of ``HEADING``."""
    state = status.state
    # A search has stopped the trial on purpose, which is neither an error nor an interruption.
    if status.why.startswith(record.PRUNED):
        state = status.why
    elif status.why:
        state += ": " + textwrap.shorten(status.why, WHY_WIDTH, placeholder=ELLIPSIS)
    best = show_best(status)
    epochs = "" if status.epoch is None else str(status.epoch)
    tags = " ".join(map(str, status.tags))
    return name, state, best, epochs, tags, status.time.replace("T", " ")


def show_best(status: record.Record | None) -> str:
    """The best value of a run, and of which metric it is; empty without one."""
    if status is None or status.best is None:
        return ""
    return f"{show(status.best)} {status.monitor}"
