"""List the runs of a folder: what they are doing, their best value, and when they were seen last.

python scripts/runs.py
python scripts/runs.py /volume/runs --last 10
python scripts/runs.py --watch
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import options

from samestep.errors import ConfigError
from samestep.ranks import process
from samestep.report import listing

WATCH_S = 2.0  # seconds between two looks


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("folder", nargs="?", default="runs", type=Path, help="default: runs")
    parser.add_argument("--last", type=int, metavar="N", help="only the N newest; default: all")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--watch", action="store_true", help="show them anew every 2 s")
    form.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(arguments: Any) -> int:
    """Print the list, once or again and again."""
    if not arguments.folder.is_dir():
        raise ConfigError(f"{arguments.folder} is no folder; name the run_root of your runs")
    if arguments.last is not None and arguments.last < 1:
        raise ConfigError(f"--last {arguments.last}: must be a whole number, at least 1")
    if arguments.watch:
        return watch(arguments)
    runs = listing.list_runs(arguments.folder)[: arguments.last]
    if arguments.json:
        print(json.dumps(listing.to_json(runs), indent=2))
    elif not runs:
        print(f"There is no run in {arguments.folder}.")
    else:
        print("\n".join(listing.to_lines(runs, time.time())))
    return 0


def watch(arguments: Any) -> int:
    """Show the newest runs that fit the terminal, until Ctrl-C, or until the terminal is closed."""
    from rich.live import Live
    from rich.text import Text

    if not sys.stdout.isatty():
        raise ConfigError("--watch: needs a terminal; without --watch the list is printed once")
    with Live(auto_refresh=False) as live:
        while sys.stdout.isatty():
            runs = listing.list_runs(arguments.folder)[: arguments.last or live.console.height - 2]
            lines = listing.to_lines(runs, time.time())
            live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
            time.sleep(WATCH_S)
    return process.EXIT_LOST_READER


if __name__ == "__main__":
    process.run(lambda: options.run(main, options.parse(make_parser())))
