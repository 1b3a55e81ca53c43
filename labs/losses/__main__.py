"""Trains losses on one, two and three ranks; their table is labs/losses/results.md.

python -m labs.losses                 # every loss, into the table; about 4 minutes
python -m labs.losses CLIP "batch"    # those whose name contains one of these texts; no table
python -m labs.losses --jobs 1        # so many programs at once; 2 without it
python -m labs.losses --no-table      # every loss, but change no file
python -m labs.losses --keep DIR      # leave the results in this new folder
"""

import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from labs import pages
from labs.command import is_chosen, make_parser
from labs.losses import program
from labs.losses.program import MODES, Job, jobs_of, modes_of, path_of, read_results
from labs.losses.shapes import SHAPES
from labs.losses.shapes.base import Shape
from labs.losses.table import render, summarize
from labs.losses.verdict import RUNS, Verdict, is_good, judge
from samestep.ranks import process
from tests import fork_server
from tests.conftest import ROOT, environment

PAGE = ROOT / "docs" / "losses.md"
RESULTS = Path(__file__).with_name("results.md")
REMEDIES = ("<!-- remedies -->\n", "<!-- end of remedies -->")
"""Of the table of the page."""


def main() -> None:
    parser = make_parser("losses", __doc__)
    parser.add_argument("names", nargs="*", help="texts in the names of losses")
    parser.add_argument("--jobs", type=int, default=2, help="programs at once")
    parser.add_argument("--no-table", action="store_true", help="print the results only")
    parser.add_argument("--keep", type=Path, help="a new folder for the results")
    args = parser.parse_args()
    chosen = [shape for shape in SHAPES if is_chosen(shape.name, args.names)]
    # The programs start as forks of a process that has imported the libraries.
    fork_server.install(environment())
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        run_all(folder, chosen, args.jobs)
        verdicts = judge_all(folder, chosen)
    words: Counter[str] = Counter()
    has_bad = False
    for job, row in verdicts.items():
        for (mode, num_ranks), verdict in row.items():
            words[verdict.word] += 1
            if not is_good(verdict, mode, is_mended=job.is_mended):
                has_bad = True
                print(f"{job.name}: {mode}, {num_ranks} ranks: {verdict}")
    counts = ", ".join(f"{number} {word}" for word, number in words.most_common())
    print(f"{counts}; {time.monotonic() - started:.0f} s")
    if not args.names and not args.no_table:
        pages.write_table(RESULTS, render(verdicts))
        pages.write_table(PAGE, summarize(SHAPES), REMEDIES)
    sys.exit(has_bad)


def run_all(folder: Path, shapes: Sequence[Shape], jobs: int) -> None:
    """Train these shapes on all numbers of ranks, so many programs at once."""
    with ThreadPoolExecutor(jobs) as pool:
        # The longest first.
        programs = pool.map(partial(run_program, folder, shapes), sorted(MODES, reverse=True))
        for _ in programs:
            pass


def judge_all(folder: Path, shapes: Sequence[Shape]) -> dict[Job, dict[tuple[str, int], Verdict]]:
    """The verdicts on each form of these shapes, by mode and number of ranks."""
    verdicts: dict[Job, dict[tuple[str, int], Verdict]] = {}
    for job in jobs_of(shapes):
        results = read_results(folder, job)
        verdicts[job] = {}
        for mode, num_ranks in RUNS:
            if mode in modes_of(job.shape, num_ranks):
                verdicts[job][mode, num_ranks] = judge(results, mode, num_ranks, draws=job.draws)
    return verdicts


def run_program(folder: Path, shapes: Sequence[Shape], num_ranks: int) -> None:
    """Train shapes on so many ranks; one that fails does not stop the others."""
    left = list(shapes)
    while left:
        # As a script it is forked, and so are its ranks: tests/fork_server.py.
        command = [sys.executable, program.__file__, f"--devices={num_ranks}", str(folder)]
        command += [str(SHAPES.index(shape)) for shape in left]
        with tempfile.TemporaryFile("w+") as errors:
            with subprocess.Popen(
                command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=errors, text=True,
            ) as running:  # fmt: skip
                assert running.stdout is not None
                for line in running.stdout:
                    print(line, end="", flush=True)
            if running.returncode == 0:
                return
            errors.seek(0)
            print(errors.read()[-2000:], file=sys.stderr, flush=True)
        # The first that has not all of its results has ended the program.
        while left and is_done(folder, left[0], num_ranks):
            left.pop(0)
        if left:
            print(f"{num_ranks} ranks: {left.pop(0).name} has failed", flush=True)


def is_done(folder: Path, shape: Shape, num_ranks: int) -> bool:
    """Whether all results of a shape are there."""
    for job in jobs_of([shape]):
        for mode in modes_of(shape, num_ranks):
            if not path_of(folder, job, mode, num_ranks).exists():
                return False
    return True


if __name__ == "__main__":
    process.run(main)
