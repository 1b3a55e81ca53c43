"""A driver whose jobs are stand-ins: ``python -m library.tests.grid.drive ROOT JOB... [option]``.

A job named ``bad...`` fails, one named ``killed...`` is killed at its first start, and one named
``waits...`` ends when ROOT/gate exists or at SIGTERM. Each leaves a line in ROOT/starts.txt.
The driver makes ROOT/polled when it has looked ten times.
"""

import itertools
import sys
import time
from pathlib import Path

from samestep.grid import driver
from samestep.grid.jobs import Job

JOB = """
import fcntl, json, os, pathlib, signal, sys, time
from datetime import datetime

root, name = pathlib.Path(sys.argv[1]), os.environ["RUN_ID"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
run_dir = root / name
run_dir.mkdir(exist_ok=True)
with open(run_dir / "claim", "w") as claim, open(root / "starts.txt", "a") as starts:
    fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if another process has it
    starts.write(f"{name} {os.environ['PLACE']}\\n")
    starts.flush()
    print("hello from", name, flush=True)
    is_first = (root / "starts.txt").read_text().split().count(name) == 1
    if name.startswith("bad"):
        print("error: the loss is infinite", flush=True)
        sys.exit(1)
    if name.startswith("always-killed") or name.startswith("killed") and is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    while name.startswith("waits") and not (root / "gate").exists():
        time.sleep(0.02)
    time.sleep(0.1)
    now = datetime.now().astimezone().isoformat()
    (run_dir / "run.json").write_text(json.dumps({"state": "finished", "time": now}))
"""


def make_grid(root: Path, names: list[str], **options: bool) -> driver.Grid:
    script = root / "job.py"
    script.write_text(JOB)
    jobs = [
        Job(name, root / name, ["seed=0"], {"seed": "0"}, lambda: "of the files") for name in names
    ]
    program = [str(script), str(root)]
    return driver.Grid("mine", root / "grids/mine", jobs, program, {}, **options)


if __name__ == "__main__":
    driver.POLL_S = 0.02
    sleep, num_polls = time.sleep, itertools.count(1)

    def count_polls(seconds: float) -> None:
        if next(num_polls) == 10:
            Path(sys.argv[1], "polled").touch()
        sleep(seconds)

    time.sleep = count_polls
    names = [word for word in sys.argv[2:] if not word.startswith("--")]
    grid = make_grid(Path(sys.argv[1]), names, stop_on_failure="--stop" in sys.argv)
    one = driver.Driver(grid)
    exit_code = one.run([{"PLACE": "0"}, {"PLACE": "1"}])
    print(f"failed: {sorted(one.failed.items())}")
    sys.exit(exit_code)
