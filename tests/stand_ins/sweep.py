"""``samestep sweep`` with trials that are a stand-in for ``train.py``, which it polls often.

When it has looked ten times, it makes a file ``polled`` in the ``run_root``.
"""

import asyncio
import itertools
import sys
from pathlib import Path

if __name__ == "__main__":
    # Not above: the process of each trial imports this file.
    from samestep import command_line
    from samestep.ranks import process
    from samestep.sweep import search
    from samestep.sweep.main import main

    search.POLL_S = 0.1
    (root,) = (word.partition("=")[2] for word in sys.argv if word.startswith("run_root="))
    sleep, num_polls = asyncio.sleep, itertools.count(1)

    async def count_polls(seconds: float) -> None:
        if next(num_polls) == 10:
            Path(root, "polled").touch()
        await sleep(seconds)

    asyncio.sleep = count_polls
    script = Path(__file__).with_name("trial.py")
    process.run(lambda: command_line.call(lambda: main(sys.argv[1:], script)))
