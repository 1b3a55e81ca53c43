"""``samestep sweep`` with trials that are a stand-in for ``train.py``, which it polls often."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Not above: the process of each trial imports this file.
    from samestep import command_line
    from samestep.ranks import process
    from samestep.sweep import search
    from samestep.sweep.main import main

    search.POLL_S = 0.1
    script = Path(__file__).with_name("trial.py")
    process.run(lambda: command_line.call(lambda: main(sys.argv[1:], script)))
