"""``samestep sweep`` with trials that are a stand-in for ``train.py``.

It looks at them five times as often, and draws its plots only with ``$FAKE_PLOTS``.
"""

import os
import sys
from pathlib import Path

from samestep.ranks import process
from samestep.sweep import results, search
from samestep.sweep.main import main

search.POLL_S = 0.1
if "FAKE_PLOTS" not in os.environ:
    results.draw_plots = lambda *_: ()

if __name__ == "__main__":
    process.run(lambda: main(sys.argv[1:], "help", Path(__file__).with_name("trial.py")))
