"""Compare runs: configuration, final figures, time and speed, and curves.

python scripts/compare.py runs/one runs/two
python scripts/compare.py 'runs/mine-*' --html compare.html
python scripts/compare.py runs/seeds runs/other-seeds --json

A path may also be a folder of runs, such as one of a sweep. Finished runs that differ in nothing
but the seed are repeats: their mean is shown, with its 95 % confidence interval. A second run of
the same seed, or one that is not finished, is shown beside them.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import options

from samestep.ranks import process
from samestep.run.files import write_text


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("runs", nargs="+", help="run directories, globs, or folders of runs")
    page = "also write a page with curves"
    parser.add_argument("--html", type=Path, metavar="FILE", help=page)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print tables for a document")
    return parser


def main(arguments: Any) -> int:
    """Print the comparison; write the page if it is wanted."""
    from samestep.report import compare

    comparison = compare.compare(compare.find_runs(arguments.runs))
    if arguments.json:
        print(json.dumps(compare.to_json(comparison), indent=2))
    else:
        compare.print_tables(comparison, markdown=arguments.markdown)
    if arguments.html:
        write_text(arguments.html, compare.to_page(comparison))
    return 0


if __name__ == "__main__":
    process.run(lambda: options.run(main, options.parse(make_parser())))
