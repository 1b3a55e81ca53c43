"""Measure the processor time of a trial, started by ``python`` and forked, one after the other.

python -m tests.samestep.sweep.cost 3
"""

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from samestep.sweep import forks
from samestep.sweep.settings import read
from tests.conftest import ROOT, environment

MEASURED = f"""
import atexit, runpy, sys, time
sys.argv[0] = {str(ROOT / "train.py")!r}
sys.path[0] = {str(ROOT)!r}
atexit.register(lambda: print("seconds", time.process_time()))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def main(num: int) -> None:
    read(["sweep=digits_lr", "trainer.accelerator=cpu"])  # imports what a search has imported
    forks.serve(can_fork=True)
    seconds: dict[str, list[float]] = {"python": [], "forked": []}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(MEASURED)
        program = [
            str(script), "model=mlp", "trainer.max_epochs=2", "trainer.accelerator=cpu",
            "report=false", "~callbacks.predictions", f"run_root={folder}",
        ]  # fmt: skip
        for index in range(2 * num):
            how = ("forked", "python")[index % 2]
            log = Path(folder, f"log-{index}")
            variables = environment(OMP_NUM_THREADS="1", RUN_ID=f"mine-{index}")
            if how == "forked":
                process = forks.start(program, variables, log)
                process.join()
                assert process.exitcode == 0, log.read_text()
            else:
                with log.open("wb") as output:
                    command = [sys.executable, *program]
                    subprocess.run(command, env=variables, stdout=output, check=True)
            seconds[how].append(float(log.read_text().split()[-1]))
            print(f"{how}: {seconds[how][-1]:.1f} s", flush=True)
    medians = {how: statistics.median(values) for how, values in seconds.items()}
    print(f"{medians}: {medians['forked'] / medians['python']:.2f}x")


if __name__ == "__main__":
    main(int(sys.argv[1]))
