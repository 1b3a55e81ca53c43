"""Runs the matrix of foreign styles, and writes its table into docs/contract.md.

python -m tests.foreign                    # every style, into the table; about 8 minutes
python -m tests.foreign GAN "batch norm"   # those whose name contains one of these texts; no table
python -m tests.foreign --jobs 4           # so many programs at once; 2 without it
python -m tests.foreign --keep DIR         # leave the runs in this new folder
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

from samestep.ranks import process
from tests import fork_server
from tests.conftest import ROOT, environment
from tests.foreign.matrix import COLUMNS, GOOD, Cell, Matrix
from tests.foreign.styles import STYLES

PAGE = ROOT / "docs" / "contract.md"
MARKERS = ("<!-- python -m tests.foreign writes this table -->", "<!-- end of the table -->")


ABOVE = """## What foreign code does here

`python -m tests.foreign` runs code in the styles of other people's examples, which knows nothing
of Samestep, and writes this table. Each run has 3 epochs. It is left alone, stopped by SIGTERM
within epoch 1, or killed within epoch 2, and then continued.

- *identical*: the weights and all figures are equal to the last bit. Two ranks see the samples of
  one rank in each step, and learn the same up to rounding. An undisturbed run is compared with
  `scripts/evaluate.py`.
- *announced*: they are not, and the run says why before its first step, or before its first step
  after the interruption.
- *rejected*: the run ends before its first step, with one line and exit code 2.
"""


def render(rows: Mapping[str, Mapping[str, Cell]]) -> str:
    """The section of the page."""
    lines = [ABOVE, f"| style | {' | '.join(COLUMNS)} | what the run says |", "|---" * 7 + "|"]
    for style in STYLES:
        words = [rows[style.name][column].word for column in COLUMNS]
        is_said = "announced" in words
        says = "; ".join(told.meaning for told in style.told) if is_said else ""
        lines.append(f"| {style.name} | {' | '.join(words)} | {says} |")
    return "\n".join(lines)


def read_table(page: str) -> dict[str, list[str]]:
    """The words of each row of the table."""
    start, end = MARKERS
    table = page.partition(start)[2].partition(end)[0]
    rows = re.findall(r"^\| (.*) \|$", table, re.M)[1:]
    return {name: words for name, *words, _ in (row.split(" | ") for row in rows)}


def write_table(rows: Mapping[str, Mapping[str, Cell]]) -> None:
    start, end = MARKERS
    before, _, rest = PAGE.read_text().partition(start)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{start}\n\n{render(rows)}\n\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.foreign", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("names", nargs="*", help="texts in the names of styles")
    parser.add_argument("--jobs", type=int, default=2, help="programs at once")
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
    if not args.names:
        write_table(rows)
    sys.exit(any(word not in GOOD for word in words))


if __name__ == "__main__":
    process.run(main)
