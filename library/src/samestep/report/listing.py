"""List the runs of a folder: their state, their best value, and when they were last seen.

samestep runs
samestep runs /volume/runs
samestep runs --json
"""

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

from samestep.command_line import Parser
from samestep.errors import ConfigError
from samestep.report.files import show, timestamp
from samestep.run import record

HEADING = ("run", "state", "best", "epochs", "tags", "seen")
WHY_WIDTH = 60  # characters of a reason


def main(argv: Sequence[str]) -> int:
    """Print the list of runs."""
    parser = Parser("samestep runs", __doc__)
    parser.add_argument("folder", nargs="?", default="runs", type=Path, help="default: runs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse(argv)
    found = list_runs(arguments.folder)
    if arguments.json:
        plain = [{"name": name} | status._asdict() for name, status in found.items()]
        print(json.dumps(plain, indent=2))
    elif not found:
        print(f"There is no run in {arguments.folder}.")
    else:
        print_table(found)
    return 0


def list_runs(folder: Path) -> dict[str, record.Record]:
    """The runs of a folder by their names, the newest first; other folders in it are left out.

    Raises:
        ConfigError: if there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name the run_root of your runs")
    found = {}
    for path in folder.iterdir():
        # Only this small file of each run is read, so that ten thousand runs take two seconds.
        status = record.read(path)
        # A run whose run.json is lost or damaged still has its configuration.
        if status.time or (path / "config.yaml").exists():
            found[path.name] = status
    return dict(sorted(found.items(), key=newest_first))


def newest_first(item: tuple[str, record.Record]) -> tuple[float, str]:
    """The sort key of a run in a list: by its time, and by name among equal times."""
    name, status = item
    return -timestamp(status.time), name


def print_table(found: dict[str, record.Record]) -> None:
    """Print a line for each run, under the heading."""
    rows = [HEADING, *rows_of(found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        # rich would need a quarter of a second for its import, and breaks lines in narrow windows.
        print("  ".join(map(str.ljust, row, widths)).rstrip())


def rows_of(found: dict[str, record.Record]) -> list[tuple[str, ...]]:
    """The cells of each run."""
    return [describe(name, status) for name, status in found.items()]


def describe(name: str, status: record.Record) -> tuple[str, ...]:
    """The cells of a run, one for each column of ``HEADING``."""
    state = status.state
    if status.why:
        state += ": " + textwrap.shorten(status.why, WHY_WIDTH, placeholder="...")
    best = ""
    if status.best is not None:
        best = f"{show(status.best)} {status.monitor}"
    epochs = "" if status.epoch is None else str(status.epoch)
    tags = " ".join(map(str, status.tags))
    return name, state, best, epochs, tags, status.time.replace("T", " ")
