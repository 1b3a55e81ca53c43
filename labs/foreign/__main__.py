"""Runs the matrix of foreign styles, and writes its table into docs/foreign.md.

python -m labs.foreign                    # every style, into the table; about 13 minutes
python -m labs.foreign --libraries        # those of real libraries, without a table
python -m labs.foreign GAN "batch norm"   # those whose name contains one of these texts; no table
python -m labs.foreign --jobs 4           # so many programs at once; 2 without it
python -m labs.foreign --keep DIR         # leave the runs in this new folder
python -m labs.foreign --no-table         # every style, but change no file
"""

import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from labs import pages
from labs.command import is_chosen, make_parser
from labs.foreign.matrix import COLUMNS, GOOD, Matrix
from labs.foreign.styles import OF_LIBRARIES, STYLES, libraries
from labs.foreign.styles.base import Style
from samestep.ranks import process
from samestep.verify.experiments import FAILED, Cell
from tests import fork_server
from tests.conftest import ROOT, environment

PAGE = ROOT / "docs" / "foreign.md"
SAME = "identical"
EVERYWHERE = "Identical in every column: "


def render(rows: Mapping[str, Mapping[str, Cell]]) -> str:
    """Styles with the same cells share a line; those that are identical everywhere follow."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for style in STYLES:
        words = [rows[style.name][column].word for column in COLUMNS]
        told = style.told if "announced" in words else ()
        says = "; ".join(note.meaning for note in told)
        groups.setdefault((*words, says), []).append(style.name)
    # Most styles: as rows they would hide the others.
    same = groups.pop((SAME,) * len(COLUMNS) + ("",), [])
    lines = [f"| style | {' | '.join(COLUMNS)} | what the run says |", "|---" * 7 + "|"]
    for cells, names in groups.items():
        lines.append(f"| {'; '.join(names)} | {' | '.join(cells)} |")
    lines += ["", f"{EVERYWHERE}{'; '.join(same)}.", ""]
    return "\n".join(lines)


def read_table(page: str) -> dict[str, list[str]]:
    """The words of each style."""
    table = pages.read_table(page)
    _, *rows = re.findall(r"^\| (.*) \|$", table, re.M)  # the first row has the headings
    (same,) = re.findall(f"^{EVERYWHERE}(.*).$", table, re.M)
    words_of = {name: [SAME] * len(COLUMNS) for name in same.split("; ")}
    for row in rows:
        names, *words, _ = row.split(" | ")
        for name in names.split("; "):
            words_of[name] = words
    return words_of


def main() -> None:
    parser = make_parser("foreign", __doc__)
    parser.add_argument("names", nargs="*", help="texts in the names of styles")
    parser.add_argument("--libraries", action="store_true", help="styles of real libraries")
    parser.add_argument("--jobs", type=int, default=2, help="programs at once")
    parser.add_argument("--no-table", action="store_true", help="print the results only")
    parser.add_argument("--keep", type=Path, help="a new folder for the runs")
    args = parser.parse_args()
    if args.libraries and not libraries.are_installed():
        sys.exit("error: this Python has no litdata; use make -C labs libraries")
    styles = OF_LIBRARIES if args.libraries else STYLES
    chosen = [style for style in styles if is_chosen(style.name, args.names)]
    # The programs start as forks of a process that has imported the libraries: half of the time.
    fork_server.install(environment())
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = run_all(Matrix(args.keep or Path(folder, "project")), chosen, args.jobs)
    words: Counter[str] = Counter()
    for row in rows.values():
        words.update(cell.word for cell in row.values())
    counts = ", ".join(f"{number} {word}" for word, number in words.most_common())
    print(f"{counts}; {time.monotonic() - started:.0f} s")
    is_whole = not args.names and not args.libraries
    if is_whole and not args.no_table:
        pages.write_table(PAGE, render(rows))
    sys.exit(any(word not in GOOD for word in words))


def run_all(matrix: Matrix, styles: Sequence[Style], jobs: int) -> dict[str, dict[str, Cell]]:
    """The rows of these styles, printed as they come."""
    rows: dict[str, dict[str, Cell]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(matrix.run, style): style for style in styles}
        for done in as_completed(waiting):
            name = waiting[done].name
            try:
                rows[name] = done.result()
            except Exception as error:  # one style must not stop the others
                rows[name] = dict.fromkeys(COLUMNS, Cell(FAILED, repr(error)))
            words = ", ".join(cell.word for cell in rows[name].values())
            print(f"{len(rows)}/{len(styles)}  {name}  [{words}]", flush=True)
            for column, cell in rows[name].items():
                if cell.word != SAME:
                    print(f"    {column}: {cell.word}: {cell.why}", flush=True)
    return rows


if __name__ == "__main__":
    process.run(main)
