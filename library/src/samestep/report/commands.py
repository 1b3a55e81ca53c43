"""The commands ``samestep report``, ``samestep compare`` and ``samestep runs``."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from samestep.command_line import Parser
from samestep.errors import ConfigError
from samestep.ranks import environment, process
from samestep.report import listing, page
from samestep.report.compare import compare as compare_runs
from samestep.report.compare import find_runs, print_tables, to_json, to_page
from samestep.run.files import write_text

WATCH_S = 2.0  # seconds between two lists

REPORT = """Write report.html, one page about a run. The run may still be training.

samestep report runs/mine
samestep report runs/mine --output mine.html
"""
COMPARE = """Compare runs: configuration, final figures, time and speed, and curves.

samestep compare runs/one runs/two
samestep compare 'runs/mine-*' --html compare.html
samestep compare runs/seeds runs/other-seeds --json

A path may also be a folder of runs, such as one of a sweep. Finished runs that differ in nothing
but the seed are repeats: their mean is shown, with its 95 % confidence interval. A second run of
the same seed, or one that is not finished, is shown beside them.
"""
RUNS = """List the runs of a folder: their state, their best value, and when they were last seen.

samestep runs
samestep runs /volume/runs --last 10
samestep runs --watch
"""


def report(argv: Sequence[str]) -> int:
    """Write the page of a run, and print where it is."""
    parser = Parser("samestep report", REPORT)
    parser.add_run_dir()
    place = "where to write, if not to report.html in the directory of the run"
    parser.add_argument("--output", type=Path, metavar="FILE", help=place)
    arguments = parser.parse(argv)
    environment.limit_threads()
    print(page.write(arguments.run_dir, arguments.output))
    return 0


def compare(argv: Sequence[str]) -> int:
    """Print the comparison of several runs; write the page if it is wanted."""
    parser = Parser("samestep compare", COMPARE)
    parser.add_argument("runs", nargs="+", help="run directories, globs, or folders of runs")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with curves")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print tables for a document")
    arguments = parser.parse(argv)
    environment.limit_threads()
    comparison = compare_runs(find_runs(arguments.runs))
    if arguments.json:
        print(json.dumps(to_json(comparison), indent=2))
    else:
        print_tables(comparison, markdown=arguments.markdown)
    if arguments.html:
        write_text(arguments.html, to_page(comparison))
    return 0


def runs(argv: Sequence[str]) -> int:
    """Print the list of runs, once or until it is interrupted."""
    parser = Parser("samestep runs", RUNS)
    parser.add_argument("folder", nargs="?", default="runs", type=Path, help="default: runs")
    parser.add_argument("--last", type=int, metavar="N", help="only the N newest; default: all")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--watch", action="store_true", help="repeat the list every 2 s")
    form.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse(argv)
    folder, last = arguments.folder, arguments.last
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name the run_root of your runs")
    if last is not None and last < 1:
        raise ConfigError(f"--last {last}: must be a whole number, at least 1")
    if arguments.watch:
        return watch(folder, last)
    found = listing.list_runs(folder)[:last]
    if arguments.json:
        print(json.dumps(listing.to_json(found), indent=2))
    elif not found:
        print(f"There is no run in {folder}.")
    else:
        print("\n".join(listing.to_lines(found, time.time())))
    return 0


def watch(folder: Path, last: int | None) -> int:
    """Show the newest runs that fit the terminal, until Ctrl-C, or until the terminal is closed."""
    from rich.live import Live
    from rich.text import Text

    if not sys.stdout.isatty():
        raise ConfigError("--watch: needs a terminal; without --watch the list is printed once")
    with Live(auto_refresh=False) as live:
        while sys.stdout.isatty():
            found = listing.list_runs(folder)[: last or live.console.height - 2]
            lines = listing.to_lines(found, time.time())
            live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
            time.sleep(WATCH_S)
    return process.EXIT_LOST_READER
