"""How long ``scripts/runs.py`` takes to list many runs, beside ten.

python -m tests.bench.many_runs 10000
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from samestep.run import state
from tests.bench.measure import ROOT

REPEATS = 5


def seconds_to_list(folder: Path) -> float:
    """The median time of the command, with its start."""
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        command = [sys.executable, ROOT / "scripts/runs.py", folder]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main(num_runs: int) -> None:
    """Make the runs, list them, and print what that took."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(num_runs):
            (folder / f"run-{number}" / "logs").mkdir(parents=True)
            facts = {"monitor": "val/accuracy", "best": number / num_runs, "epoch": 20}
            state.record(folder / f"run-{number}", state.FINISHED, **facts)
            if number == 9:
                few = seconds_to_list(folder)
        many = seconds_to_list(folder)
    print(f"{num_runs:,} runs: {many:.2f} s, {many / few:.1f} times as long as 10 runs")


if __name__ == "__main__":
    main(int(sys.argv[1]))
