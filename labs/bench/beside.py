"""How fast this tree is beside another checkout of the project, in one run: A B B A.

git worktree add ../before COMMIT && make -C ../before .venv/dev.stamp
python -m labs.bench.beside ../before                      # every row, 5 repeats: 20 minutes
python -m labs.bench.beside ../before mnist ranks --repeats 9

Each line is the time of this tree as a multiple of the other's: the median of the repeats, an
interval of 95 %, and all of them. Losses must be the same.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

from labs.bench.measure import ROOT, gate, interval, run
from labs.bench.rows import TWO

ROWS = {
    "step": "-m {labs}.bench.contender epochs:ours linear",
    "mnist": "-m {labs}.bench.contender epochs:ours mnist",
    "cifar": "-m {labs}.bench.contender epochs:ours cifar",
    "ranks": TWO + "-m {labs}.bench.contender epochs:ours cifar",
    "save": "-m {labs}.bench.contender commands:save",
    "start": (
        "train.py trainer.accelerator=cpu run_root={folder} "
        "+callbacks.bench._target_={labs}.bench.callbacks.FirstStep"
    ),
}


def command_of(row: str, tree: Path, folder: Path) -> str:
    """What follows ``python`` in the command line of a row; older trees have the bench in tests."""
    labs = "labs" if (tree / "labs/bench").exists() else "tests"
    return ROWS[row].format(labs=labs, folder=folder)


def compare(before: Path, row: str, repeats: int, folder: Path) -> str:
    """One line: how long this tree takes, as a multiple of the other."""
    ratios = []
    for repeat in range(repeats):
        trees = [ROOT, before] if repeat % 2 == 0 else [before, ROOT]
        results = {tree: run(command_of(row, tree, folder), tree) for tree in trees}
        wrong = gate({str(tree): result for tree, result in results.items()})
        if wrong:
            return f"{row}: does not count: {wrong}"
        ratios.append(results[ROOT]["value"] / results[before]["value"])
    low, high = interval(ratios)
    every = " ".join(f"{ratio:.3f}" for ratio in sorted(ratios))
    return f"{row}: {median(ratios):.3f} ({low:.3f} to {high:.3f}), n {repeats}: {every}"


def main() -> None:
    """Compare the rows that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="another checkout, with its .venv")
    parser.add_argument("rows", nargs="*", default=[*ROWS], help=f"of {', '.join(ROWS)}")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    unknown = [row for row in arguments.rows if row not in ROWS]
    if unknown:
        parser.error(f"no row is called {unknown[0]}; choose from {', '.join(ROWS)}")
    if not (arguments.before / ".venv/bin/python").exists():
        parser.error(f"{arguments.before}: must be a checkout with a .venv; run make test there")
    with tempfile.TemporaryDirectory() as folder:
        for row in arguments.rows:
            print(compare(arguments.before.resolve(), row, arguments.repeats, Path(folder)))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
