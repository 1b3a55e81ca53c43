"""List the runs of a folder: their state, their best value, and when they were last seen.

samestep runs
samestep runs /volume/runs
samestep runs --json
"""

# It imports no torch, and reads one small file of each run: ten thousand take two seconds.
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

from samestep.command_line import Parser
from samestep.errors import ConfigError
from samestep.report.files import instant, show
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
        print(json.dumps([{"name": name} | found[name]._asdict() for name in found], indent=2))
    elif not found:
        print(f"There is no run in {arguments.folder}.")
    else:
        rows = [HEADING, *(describe(*run) for run in found.items())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(map(str.ljust, row, widths)).rstrip())
    return 0


def list_runs(folder: Path) -> dict[str, record.Record]:
    """The runs of a folder by their names, the newest first; other folders in it are left out.

    Raises:
        ConfigError: if there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name the run_root of your runs")
    found = {path.name: record.read(path) for path in folder.iterdir()}
    # A run whose file of its state is lost or damaged still has its configuration.
    names = [name for name in found if found[name].time or (folder / name / "config.yaml").exists()]
    return {name: found[name] for name in sorted(names, key=lambda n: (-instant(found[n].time), n))}


def describe(name: str, status: record.Record) -> tuple[str, ...]:
    """What the list says of a run, under ``HEADING``."""
    why = textwrap.shorten(status.why, WHY_WIDTH, placeholder="...")
    return (
        name,
        f"{status.state}: {why}" if why else status.state,
        "" if status.best is None else f"{show(status.best)} {status.monitor}",
        "" if status.epoch is None else str(status.epoch),
        " ".join(map(str, status.tags)),
        status.time.replace("T", " "),
    )
