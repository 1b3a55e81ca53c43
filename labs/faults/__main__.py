"""The fault laboratory: harms real runs, lets them continue, and compares them with unharmed ones.

python -m labs.faults                 # every fault, into the table of labs/faults/results.md
python -m labs.faults SIGKILL "1+1"   # those whose name and topology contain all of these words
python -m labs.faults --from 37       # from number 37 on: to go on after an interruption
python -m labs.faults --list          # print the faults with their numbers, and run none
python -m labs.faults --no-table      # change no file: print the results only
python -m labs.faults --keep          # and keep what a lost run left, in ./lost

Pods need the right to make namespaces, and etcd its program: where these are missing, the faults
that need them are left out.
"""

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from labs.command import make_parser
from labs.faults.experiments import EXPERIMENTS, note
from labs.faults.lab import ETCD, PODS, Experiment, Laboratory, Outcome
from library.tests import etcd_server, pods
from samestep.ranks import process


def parse_arguments() -> argparse.Namespace:
    parser = make_parser("faults", __doc__)
    parser.add_argument("words", nargs="*", help="only faults with all of these words")
    parser.add_argument("--from", type=int, default=1, dest="first", help="number to begin with")
    parser.add_argument("--list", action="store_true", help="print the faults, and run none")
    parser.add_argument("--no-table", action="store_true", help="print the results only")
    parser.add_argument("--keep", action="store_true", help="keep what a lost run left, in ./lost")
    # Intermixed: words may stand before and behind an option.
    return parser.parse_intermixed_args()


def choose(first: int, words: Sequence[str]) -> list[Experiment]:
    """The experiments from a number on, whose names and topologies contain all words."""
    chosen = []
    for experiment in EXPERIMENTS[first - 1 :]:
        title = f"{experiment.name} {experiment.topology}"
        if all(word in title for word in words):
            chosen.append(experiment)
    return chosen


def without_what_is_missing(experiments: list[Experiment]) -> list[Experiment]:
    """The experiments that this machine can run; the others are named by what they need."""
    if why := pods.why_not():
        print(f"without pods: {why}")
        experiments = [e for e in experiments if not e.topology.startswith(PODS)]
    if why := etcd_server.why_not():
        print(f"without etcd: {why}")
        experiments = [e for e in experiments if e.topology != ETCD]
    return experiments


def label(experiment: Experiment) -> str:
    number = EXPERIMENTS.index(experiment) + 1
    return f"{number}/{len(EXPERIMENTS)}  {experiment.name}  [{experiment.topology}]"


def describe(outcome: Outcome) -> str:
    result = "survived" if outcome.survived else f"LOST: {outcome.why}"
    return f"{result}  {outcome.steps_repeated} steps repeated"


def end_as_by_ctrl_c(signum: int, frame: FrameType | None) -> None:
    """Leave all blocks, which end their processes: each has a session of its own."""
    sys.exit(128 + signum)


def main() -> None:
    args = parse_arguments()
    chosen = choose(args.first, args.words)
    if args.list:
        print("\n".join(map(label, chosen)))
        return
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, end_as_by_ctrl_c)
    chosen = without_what_is_missing(chosen)
    num_lost = 0
    with tempfile.TemporaryDirectory() as directory:
        laboratory = Laboratory(Path(directory))
        for experiment in chosen:
            outcome = laboratory.run(experiment)
            print(f"{label(experiment)}  {describe(outcome)}", flush=True)
            if not args.no_table:
                note(experiment, outcome)
            if outcome.survived:
                continue
            num_lost += 1
            if args.keep:
                shutil.copytree(directory, "lost", dirs_exist_ok=True)
    print(f"{len(chosen) - num_lost} of {len(chosen)} survived")
    sys.exit(num_lost > 0)


if __name__ == "__main__":
    process.run(main)
