"""The laboratory of grids: kills anything at random, and compares with a loop in a shell.

python -m labs.grids                            # 6 runs on 2 ranks, 50 kills
python -m labs.grids --runs 2 --kills 4 --seed 1

At most two drivers at once train the grid, as often as it takes until one of them says that all is
finished. Meanwhile processes are killed at random, with SIGKILL: drivers, agents and ranks. Then
each run must be finished, and its weights, its metrics and their history must be those of a run
that was started by hand and left alone. docs/grids.md has the results.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch

from labs.command import make_parser
from samestep.ranks import process
from samestep.run import record
from tests import fork_server
from tests.conftest import ROOT, environment, final_metrics, run
from tests.project.test_train import history

WORDS = [
    "trainer.accelerator=cpu", "data.global_batch_size=60", "trainer.max_epochs=3", "model=mlp",
    "model.net.dropout=0.2", "report=false", "trainer.devices=2",
    "callbacks.checkpoints.every_s=1",
]  # fmt: skip
SLOW = ["+callbacks.slow._target_=labs.faults.saboteur.Slow", "+callbacks.slow.seconds=0.5"]
"""Time to be killed in: half a second before each of 60 steps."""
NAME = "grid"
Driver = subprocess.Popen[bytes]


def start(root: Path, num_runs: int) -> Driver:
    seeds = ",".join(map(str, range(num_runs)))
    command = ["train.py", "-m", *WORDS, *SLOW, f"seed={seeds}", f"run_root={root}", "grid.jobs=2"]
    with (root / "drivers.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment(RUN_ID=NAME),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def processes_of_jobs(root: Path) -> list[int]:
    """Agents and ranks, whichever driver has started them: their output is the log of a job."""
    logs = root / "grids" / NAME / "logs"
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # It may have ended meanwhile, or be another user's.
        with suppress(OSError):
            if (folder / "fd/1").readlink().parent == logs:
                found.append(int(folder.name))
    return found


def harm(
    root: Path, num_runs: int, num_kills: int, pause_s: float, dice: random.Random
) -> Counter[str]:
    """Train the grid while its processes are killed; return how many of each kind were.

    Args:
        root: the folder of all runs.
        num_runs: of the grid.
        num_kills: in all.
        pause_s: the longest time between two of them.
        dice: says what is killed, and when.
    """
    kills: Counter[str] = Counter()
    drivers = [start(root, num_runs)]
    while True:
        time.sleep(dice.uniform(0.5, pause_s))
        codes = [driver.poll() for driver in drivers]
        if 0 in codes:
            break
        drivers = [driver for driver in drivers if driver.poll() is None]
        # Sometimes a second one, while the first one trains.
        if not drivers or (len(drivers) == 1 and dice.random() < 0.2):
            drivers.append(start(root, num_runs))
        if kills.total() >= num_kills:
            continue
        victims = [("agent or rank", pid) for pid in processes_of_jobs(root)]
        # A driver that is killed before it has started a job would be the only victim.
        if victims and dice.random() < 0.33:
            victims = [("driver", driver.pid) for driver in drivers]
        if not victims:
            continue
        kind, pid = dice.choice(victims)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            kills[kind] += 1
            print(f"{kills.total()}/{num_kills}  {kind}", flush=True)
    for driver in drivers:
        driver.wait()
    return kills


def differences(run_dir: Path, by_hand: Path) -> list[str]:
    """In what a run of the grid differs from one that was left alone."""
    found = []
    status = record.read(run_dir)
    if status.state != record.FINISHED:
        found.append(f"it is {status.state}")
        return found
    states = []
    for path in (run_dir, by_hand):
        states.append(torch.load(path / "checkpoints/last.ckpt", weights_only=True)["state_dict"])
    if any(not torch.equal(states[0][name], states[1][name]) for name in states[1]):
        found.append("weights")
    if final_metrics(run_dir) != final_metrics(by_hand):
        found.append("metrics")
    if history(run_dir) != history(by_hand):
        found.append("history")
    return found


def main() -> None:
    parser = make_parser("grids", __doc__)
    parser.add_argument("--runs", type=int, default=6, help="default: 6")
    parser.add_argument("--kills", type=int, default=50, help="default: 50")
    parser.add_argument(
        "--pause", type=float, default=6, help="s between kills at most; default: 6"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is killed, and when")
    parser.add_argument("--keep", action="store_true", help="keep what a lost grid left, in ./lost")
    args = parser.parse_args()
    fork_server.install(environment())
    num_lost = 0
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory).resolve()
        kills = harm(root, args.runs, args.kills, args.pause, random.Random(args.seed))
        for seed in range(args.runs):
            words = [*WORDS, f"seed={seed}", f"run_root={root / 'by_hand'}"]
            done = run("train.py", *words, RUN_ID=str(seed))
            assert done.returncode == 0, done.stderr
            run_dir = root / f"{NAME}-seed-{seed}"
            found = differences(run_dir, root / "by_hand" / str(seed))
            starts = len(record.read(run_dir).starts)
            print(f"seed {seed}: {starts} starts, {', '.join(found) or 'identical'}", flush=True)
            num_lost += bool(found)
        if num_lost and args.keep:
            shutil.copytree(root, "lost", dirs_exist_ok=True)
    killed = ", ".join(f"{number} x {kind}" for kind, number in sorted(kills.items()))
    print(f"killed {killed}: {args.runs - num_lost} of {args.runs} runs are identical")
    sys.exit(num_lost > 0)


if __name__ == "__main__":
    process.run(main)
