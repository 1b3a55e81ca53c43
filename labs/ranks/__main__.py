"""Trains nets by virtual ranks on 1, 2, 3, 4 and 8 ranks; their table is labs/ranks/results.md.

python -m labs.ranks                  # every row, into the table
python -m labs.ranks Dice "batch"     # those whose name contains one of these texts; no table
python -m labs.ranks --ranks 1 2      # on these numbers of ranks; no table
python -m labs.ranks --no-table       # every row, but change no file
python -m labs.ranks --keep DIR       # leave the runs in this new folder

Each is also ended by SIGTERM or SIGKILL within an epoch, and continued on another number of ranks.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import product
from pathlib import Path

from labs import pages
from labs.command import is_chosen, make_parser
from labs.ranks import program
from labs.ranks.program import RESULT, Job
from labs.ranks.rows import CONTROL, NUMBERS, ROWS, Row
from library.tests.programs import environment, free_port
from samestep.ranks import process
from tests import fork_server
from tests.conftest import ROOT

PAGE = Path(__file__).with_name("results.md")
ENDINGS = {"": "undisturbed", "SIGTERM": "SIGTERM", "SIGKILL": "SIGKILL"}
EQUAL, MISSING = "equal", "no result"
HEADING = f"| | SHA-256 | {' | '.join(ENDINGS.values())} |\n|---|---|---|---|---|"

Digests = dict[tuple[str, int], dict[str, str]]
"""Of the parts of a result, by how the run was ended first, and the ranks on which it began."""


def main() -> None:
    parser = make_parser("ranks", __doc__)
    parser.add_argument("names", nargs="*", help="texts in the names of rows")
    parser.add_argument("--ranks", type=int, nargs="+", default=NUMBERS, help="numbers of ranks")
    parser.add_argument("--no-table", action="store_true", help="print the results only")
    parser.add_argument("--keep", type=Path, help="a new folder for the runs")
    args = parser.parse_args()
    chosen = [row for row in [*ROWS, CONTROL] if is_chosen(row.name, args.names)]
    # The programs start as forks of a process that has imported the libraries.
    fork_server.install(environment())
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        found = run_rows(args.keep or Path(temporary), chosen, args.ranks)
    lines = [line_of(name, digests) for name, digests in found.items()]
    table = "\n".join([HEADING, *lines, ""])
    print(table)
    print(f"{time.monotonic() - started:.0f} s")
    if not args.names and not args.no_table and args.ranks == NUMBERS:
        pages.write_table(PAGE, table)
    sys.exit(not all(is_good(name, digests) for name, digests in found.items()))


def run_rows(
    folder: Path, rows: Sequence[Row], numbers: Sequence[int], **variables: str
) -> dict[str, Digests]:
    """Train rows on so many ranks: undisturbed, and interrupted and continued on the next number.

    Args:
        folder: for the runs.
        rows: those to train.
        numbers: of ranks.
        variables: more ones for the programs.

    Returns:
        The digests of each row, by its name.
    """
    folder.mkdir(exist_ok=True)
    parts: list[tuple[int, list[Job]]] = []
    continued: list[tuple[int, list[Job]]] = []
    for number, after in zip(numbers, [*numbers[1:], numbers[0]], strict=True):
        jobs = [*jobs_of(folder, rows, number, ENDINGS)]
        parts.append((number, jobs))
        again = [job._replace(signal="", port=free_port()) for job in jobs if job.signal]
        continued.append((after, again))
    # Most ranks first, for they take longest; two programs at once, for two processors.
    with ThreadPoolExecutor(2) as pool:
        for programs in (parts, continued):
            ordered = sorted(programs, key=lambda part: -part[0])
            for _ in pool.map(lambda part: run_ranks(*part, **variables), ordered):
                pass
    return {row.name: read_digests(folder, row, numbers) for row in rows}


def jobs_of(
    folder: Path, rows: Iterable[Row], number: int, endings: Iterable[str]
) -> Iterable[Job]:
    """The first part of each run on so many ranks."""
    for row, ending in product(rows, endings):
        if is_run(row, number, ending):
            index = -1 if row is CONTROL else ROWS.index(row)
            yield Job(index, str(path_of(folder, row, number, ending)), ending, free_port())


def is_run(row: Row, number: int, ending: str) -> bool:
    """Whether a run of a row begins on so many ranks, and ends so first."""
    return number in row.ranks and not (ending and row is CONTROL)


def path_of(folder: Path, row: Row, number: int, ending: str) -> Path:
    """The directory of a run, by the ranks on which it began."""
    index = [*ROWS, CONTROL].index(row)
    return folder / f"{index}-{number}-{ENDINGS[ending]}"


def run_ranks(number: int, jobs: Sequence[Job], **variables: str) -> None:
    """Run jobs one after the other on so many ranks, as torchrun would start them."""
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "jobs.json")
        path.write_text(json.dumps(jobs))
        ranks = []
        for rank in range(number):
            names = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
            names |= {"WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number}
            texts = {name: str(value) for name, value in names.items()} | variables
            texts |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none"}
            with Path(f"{jobs[0].folder}-{rank}.log").open("a") as log:
                # As a script it is forked: tests/fork_server.py.
                started = subprocess.Popen(
                    [sys.executable, program.__file__, str(path)], cwd=ROOT,
                    env=environment(**texts), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip
            ranks.append(started)
        for started in ranks:
            started.wait()


def read_digests(folder: Path, row: Row, numbers: Sequence[int]) -> Digests:
    """What the runs of a row ended with; empty where one has failed."""
    found: Digests = {}
    for number, ending in product(numbers, ENDINGS):
        if is_run(row, number, ending):
            path = path_of(folder, row, number, ending) / RESULT
            found[ending, number] = json.loads(path.read_text()) if path.exists() else {}
    return found


def line_of(name: str, digests: Digests) -> str:
    """A line of the table: the digest of the first run, and the ranks where another one is."""
    reference = next(iter(digests.values()))
    cells = [name, f"`{sha256(repr(reference).encode()).hexdigest()[:16]}`"]
    for ending in ENDINGS:
        words = []
        for (of, number), parts in digests.items():
            if of == ending and (parts != reference or not parts):
                others = [part for part in parts if parts[part] != reference.get(part)]
                words.append(f"{number}: {', '.join(others) or MISSING}")
        is_there = any(of == ending for of, _ in digests)
        cells.append("; ".join(words) or (EQUAL if is_there else "-"))
    return f"| {' | '.join(cells)} |"


def is_good(name: str, digests: Digests) -> bool:
    """Whether all runs of a row have ended alike; of the control no two may."""
    results = [json.dumps(parts) for parts in digests.values()]
    expected = len(results) if name == CONTROL.name else 1
    return all(digests.values()) and len({*results}) == expected


if __name__ == "__main__":
    process.run(main)
