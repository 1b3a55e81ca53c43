"""How fast a run is, beside what it is compared with. ``make -C labs bench`` calls it.

python -m labs.bench                        # every row, 9 repeats: an hour
python -m labs.bench mnist step             # rows whose names contain one of these words
python -m labs.bench mnist --repeats 5
python -m labs.bench mnist --no-table       # only into runs/bench.json

Each repeat starts every contender in a process of its own, in turn: A B B A. Contenders of one
recipe must have the same losses, or their times do not count and the exit code is 1. The results
go to runs/bench.json, and into the table of labs/bench/results.md.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from labs import pages
from labs.bench import measure
from labs.bench.measure import ROOT, Row
from labs.bench.rows import all_rows
from labs.command import make_parser
from samestep.plugins.provenance import machine_info
from samestep.ranks import process

PAGE = ROOT / "labs/bench/results.md"
RESULTS = ROOT / "runs" / "bench.json"
HEADINGS = ["workload", "compared", "median (95 % interval)", "n", "met", "peak MiB"]


def note(page: Path, order: Sequence[str], lines: Sequence[list[str]]) -> None:
    """Put results into the table of a page, in the order of the workloads.

    Lines of one workload have its name, and its peaks of memory, once.
    """
    old = pages.read_table(page.read_text())
    cells: list[list[str]] = []
    for line in old.splitlines()[2:]:
        title, *others, peak = (cell.strip() for cell in line.split("|")[1:-1])
        cells.append([title or cells[-1][0], *others, peak if title else cells[-1][-1]])
    measured = {title for title, *_ in lines}
    table = [cell for cell in cells if cell[0] not in measured and cell[0] in order] + [*lines]
    table.sort(key=lambda cell: order.index(cell[0]))
    titles = [row[0] for row in table]
    repeats = [above == title for above, title in zip(["", *titles], titles, strict=False)]
    table = [
        ["", *row[1:-1], ""] if is_repeated else row
        for row, is_repeated in zip(table, repeats, strict=True)
    ]
    text = "\n".join(
        f"| {' | '.join(row)} |" for row in [HEADINGS, ["---"] * len(HEADINGS), *table]
    )
    pages.write_table(page, f"{text}\n")


def bench(
    rows: Sequence[Row], repeats: int, page: Path | None, json_path: Path, order: Sequence[str]
) -> int:
    """Measure rows; returns the exit code. ``order``: the workloads as the table has them."""
    around = machine_info()
    results = json.loads(json_path.read_text()) if json_path.exists() else {}
    is_wrong = False
    for row in rows:
        lacks = "no GPU" if row.needs_gpu and not around["gpus"] else row.lacks
        if lacks:
            lines = [[row.title, "; ".join(row.claims), lacks, "", "", ""]]
        else:
            measured = measure.measure(row, repeats)
            lines = measure.lines_of(row, measured)
            results[row.name] = {**around, **measured}
            if measured["wrong"]:
                is_wrong = True
                print(f"error: {row.name}: {measured['wrong']}", file=sys.stderr)
        for line in lines:
            print("  ".join(cell for cell in line if cell), flush=True)
        json_path.parent.mkdir(exist_ok=True)
        json_path.write_text(json.dumps(results, indent=1) + "\n")
        if page:
            note(page, order, lines)
    return int(is_wrong)


def main() -> None:
    parser = make_parser("bench", __doc__)
    parser.add_argument("words", nargs="*", help="parts of the names of rows; none: every row")
    parser.add_argument("--repeats", type=int, default=9, help="default: 9")
    parser.add_argument("--no-table", action="store_true", help="leave results.md as it is")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="samestep-bench-") as folder:
        rows = all_rows(Path(folder))
        names, order = [row.name for row in rows], [row.title for row in rows]
        if unknown := [word for word in chosen.words if not any(word in name for name in names)]:
            sys.exit(f"error: {unknown[0]}: no row has this in its name; rows: {', '.join(names)}")
        rows = [row for row in rows if any(word in row.name for word in chosen.words or [""])]
        page = None if chosen.no_table else PAGE
        sys.exit(bench(rows, chosen.repeats, page, RESULTS, order))


if __name__ == "__main__":
    process.run(main)
