"""Measure the processor time of a trial, started by ``python`` and forked, one after the other.

python -m tests.samestep.sweep.cost 3
"""

import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from samestep.sweep.forks import Forked, Forks, loaded_libraries
from samestep.sweep.settings import read
from tests.conftest import ROOT, environment


def main(num: int) -> None:
    read(["sweep=digits_lr", "trainer.accelerator=cpu"])  # imports what a search has imported
    forks, seconds = Forks(loaded_libraries()), {"python": [], "forked": []}
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("wb") as log:
        program = [
            str(ROOT / "train.py"), "model=mlp", "trainer.max_epochs=2", "trainer.accelerator=cpu",
            "report=false", "~callbacks.predictions", f"run_root={folder}",
        ]  # fmt: skip
        for index in range(2 * num):
            how = ("forked", "python")[index % 2]
            variables = environment(OMP_NUM_THREADS="1", RUN_ID=f"mine-{index}")
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            process: Forked | subprocess.Popen[bytes] | None
            if how == "forked":
                process = forks.start(program, variables, log)
            else:
                process = subprocess.Popen([sys.executable, *program], env=variables, stdout=log)
            assert process
            assert process.wait() == 0
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            seconds[how].append(used)
            print(f"{how}: {used:.1f} s", flush=True)
    medians = {how: statistics.median(values) for how, values in seconds.items()}
    print(f"{medians}: {medians['forked'] / medians['python']:.2f}x")


if __name__ == "__main__":
    main(int(sys.argv[1]))
