"""The commands ``samestep report``, ``samestep compare`` and ``samestep runs``."""

import json
from collections.abc import Sequence
from pathlib import Path

from samestep.command_line import Parser
from samestep.ranks import environment
from samestep.report import charts, listing, page
from samestep.report.compare import compare as compare_runs
from samestep.report.compare import find_runs, print_tables
from samestep.report.files import read_run
from samestep.report.live import serve
from samestep.run import record
from samestep.run.files import write_text

REPORT = """Write report.html, one page about a run. The run may still be training.

samestep report runs/mine
samestep report --serve
samestep report --serve /volume/runs --port 8000

--serve shows all runs of a folder in a browser of this machine, while they train, and compares
those that are ticked.
"""
COMPARE = """Compare runs: configuration, final figures, time and speed, and curves.

samestep compare runs/one runs/two
samestep compare runs/mine-* --html compare.html
samestep compare runs/seeds runs/other-seeds --json

A path may also be a folder of runs, such as one of a sweep. Finished runs that differ in nothing
but the seed are repeats: their mean is shown, with its 95 % confidence interval. A second run of
the same seed, or one that is not finished, is shown beside them.
"""
RUNS = """List the runs of a folder: their state, their best value, and when they were last seen.

samestep runs
samestep runs /volume/runs
samestep runs --json
"""


def report(argv: Sequence[str]) -> int:
    """Write the page of a run, and print where it is; or serve the pages of all runs."""
    parser = Parser("samestep report", REPORT)
    if "--serve" in argv:
        parser.add_argument("folder", nargs="?", default="runs", type=Path, help="default: runs")
        parser.add_argument("--port", type=int, default=0, help="default: any free one")
    else:
        parser.add_run_dir()
    parser.add_argument("--serve", action="store_true", help="show a folder of runs, live")
    arguments = parser.parse(argv)
    environment.limit_threads()
    if arguments.serve:
        listing.list_runs(arguments.folder)  # a folder that is not there is an error at once
        serve(arguments.folder, arguments.port)
    else:
        print(page.write(arguments.run_dir))
    return 0


def compare(argv: Sequence[str]) -> int:
    """Print the comparison of several runs; write the page if it is wanted."""
    parser = Parser("samestep compare", COMPARE)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, or folders of runs")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with curves")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse(argv)
    environment.limit_threads()
    runs = [read_run(path) for path in find_runs(arguments.runs)]
    tables = compare_runs(runs)
    if arguments.json:
        # By title and row, the heading as "columns", and figures as numbers.
        plain = {
            title: {key or "columns": [cell.value or cell for cell in row] for key, *row in rows}
            for title, rows in tables.items()
        }
        print(json.dumps(plain, indent=2))
    else:
        print_tables(tables)
    if arguments.html:
        text = (
            page.templates()
            .get_template("compare.html")
            .render(
                title=" and ".join(tables["Runs"][0][1:]),
                tables=tables,
                charts=charts.charts_of(runs),
                plotly=charts.plotly_text(),
                problems=[f"{run.name}: {problem}" for run in runs for problem in run.problems],
            )
        )
        write_text(arguments.html, text)
    return 0


def runs(argv: Sequence[str]) -> int:
    """Print the list of runs."""
    parser = Parser("samestep runs", RUNS)
    parser.add_argument("folder", nargs="?", default="runs", type=Path, help="default: runs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse(argv)
    found = listing.list_runs(arguments.folder)
    if arguments.json:
        fields = [name for name in record.Record._fields if name not in ("ends", "starts")]
        plain = [{"name": r.name} | {f: getattr(r.status, f) for f in fields} for r in found]
        print(json.dumps(plain, indent=2))
    elif not found:
        print(f"There is no run in {arguments.folder}.")
    else:
        rows = [listing.HEADING, *(run.cells for run in found)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(map(str.ljust, row, widths)).rstrip())
    return 0
