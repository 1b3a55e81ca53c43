"""What each trial on a CPU would import: the process whose forks are trials imports it once."""

import gc
import os
from pathlib import Path

import lightning  # noqa: F401
import torchmetrics  # noqa: F401

import samestep.ending
import samestep.hydra.main
import samestep.report.page
import samestep.run.nodes  # noqa: F401

# The server is silent, also when it ends; its forks write to the logs of the trials.
with Path(os.devnull).open("w") as nothing:
    os.dup2(nothing.fileno(), 2)

# OpenBLAS ends its threads before a fork, and starts them again. A fork would lack other threads.
if os.fork() == 0:
    os._exit(0)
os.wait()
if len(list(Path("/proc/self/task").iterdir())) > 1:
    raise ImportError("a library has started a thread; trials import the libraries themselves")

# The garbage collector writes to objects. Those that it leaves alone stay shared.
gc.collect()
gc.freeze()
