"""One contender, in this process: python -m labs.bench.contender epochs:bare WORDS...

If it hangs, ``labs.bench.measure`` asks for the stacks of its threads before it ends it.
"""

import faulthandler
import os
import pkgutil
import signal
import sys

from labs.bench.measure import say


def show_stacks_when_asked() -> None:
    """Let SIGQUIT write the stacks of all threads to stderr; also while no thread answers."""
    # Not `dump_traceback_later`: a process has one such countdown, and the watchdog of a run
    # restarts and stops it, so that nothing would be seen of a hang after training.
    faulthandler.register(signal.SIGQUIT, all_threads=True)


def main() -> None:
    """Say what the contender of the command line has measured."""
    show_stacks_when_asked()
    import torch  # takes seconds, in which it may hang

    name, *words = sys.argv[1:]
    torch.set_num_threads(1)
    result = pkgutil.resolve_name(f"labs.bench.{name}")(*words)
    if os.environ.get("RANK", "0") == "0":
        say(**result)


if __name__ == "__main__":
    main()
