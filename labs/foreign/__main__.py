"""Runs the matrix of foreign styles, and writes its table into docs/foreign.md.

python -m labs.foreign                    # every style, into the table; about 8 minutes
python -m labs.foreign GAN "batch norm"   # those whose name contains one of these texts; no table
python -m labs.foreign --jobs 4           # so many programs at once; 2 without it
python -m labs.foreign --keep DIR         # leave the runs in this new folder
python -m labs.foreign --no-table         # every style, but change no file
"""

import argparse
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from labs.foreign.matrix import COLUMNS, GOOD, Cell, Matrix
from labs.foreign.styles import STYLES
from samestep.ranks import process
from tests import fork_server
from tests.conftest import ROOT, environment

PAGE = ROOT / "docs" / "foreign.md"
MARKERS = ("<!-- table -->\n", "<!-- end -->")
SAME = "identical"
EVERYWHERE = "Identical in every column: "


def render(rows: Mapping[str, Mapping[str, Cell]]) -> str:
    """Styles with the same cells share a line; those that are identical everywhere follow."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for style in STYLES:
        words = [rows[style.name][column].word for column in COLUMNS]
        told = style.told if "announced" in words else ()
        says = "; ".join(reason.meaning for reason in told)
        groups.setdefault((*words, says), []).append(style.name)
    same = groups.pop((SAME,) * len(COLUMNS) + ("",), [])
    lines = [f"| style | {' | '.join(COLUMNS)} | what the run says |", "|---" * 7 + "|"]
    lines += [f"| {'; '.join(names)} | {' | '.join(cells)} |" for cells, names in groups.items()]
    return "\n".join([*lines, "", EVERYWHERE + "; ".join(same) + ".", ""])


def read_table(page: str) -> dict[str, list[str]]:
    """The words of each style."""
    start, end = MARKERS
    table = page.partition(start)[2].partition(end)[0]
    rows = re.findall(r"^\| (.*) \|$", table, re.M)[1:]
    cells = [row.split(" | ") for row in rows]
    (same,) = re.findall(f"^{EVERYWHERE}(.*).$", table, re.M)
    cells.append([same, *[SAME] * len(COLUMNS), ""])
    return {name: words for names, *words, _ in cells for name in names.split("; ")}


def write_table(rows: Mapping[str, Mapping[str, Cell]]) -> None:
    start, end = MARKERS
    before, _, rest = PAGE.read_text().partition(start)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{start}{render(rows)}{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m labs.foreign", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("names", nargs="*", help="texts in the names of styles")
    parser.add_argument("--jobs", type=int, default=2, help="programs at once")
    parser.add_argument("--no-table", action="store_true", help="print the results only")
    parser.add_argument("--keep", type=Path, help="a new folder for the runs")
    args = parser.parse_args()
    chosen = [s for s in STYLES if not args.names or any(name in s.name for name in args.names)]
    fork_server.install(environment())
    started = time.monotonic()
    rows: dict[str, dict[str, Cell]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        matrix = Matrix(args.keep or Path(folder, "project"))
        waiting = {pool.submit(matrix.run, style): style for style in chosen}
        for done in as_completed(waiting):
            style = waiting[done]
            try:
                rows[style.name] = done.result()
            except Exception as error:  # one style must not stop the others
                rows[style.name] = dict.fromkeys(COLUMNS, Cell("failed", repr(error)))
            words = [cell.word for cell in rows[style.name].values()]
            print(f"{len(rows)}/{len(chosen)}  {style.name}  [{', '.join(words)}]", flush=True)
            for column, cell in rows[style.name].items():
                if cell.word != "identical":
                    print(f"    {column}: {cell.word}: {cell.why}", flush=True)
    words = Counter(cell.word for row in rows.values() for cell in row.values())
    print(", ".join(f"{number} {word}" for word, number in words.most_common()), end="")
    print(f"; {time.monotonic() - started:.0f} s")
    if not args.names and not args.no_table:
        write_table(rows)
    sys.exit(any(word not in GOOD for word in words))


if __name__ == "__main__":
    process.run(main)
