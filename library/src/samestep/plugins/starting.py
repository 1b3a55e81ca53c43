"""How a Trainer starts ranks on its machine: its process becomes their agent, another program.

The agent, ``samestep.node.agent``, runs the script again in each rank. This module only says how
many ranks there must be and what they run, so that no script and no rank imports the agent.
"""

import gc
import inspect
import io
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from samestep.errors import ConfigError
from samestep.option_names import option, setting
from samestep.plugins import device_option
from samestep.ranks import environment
from samestep.run_spec import RunSpec

# It takes the number of ranks, the name of the run, and what Python runs in each rank. ``python
# -m`` would search the current folder instead of that of the script.
AGENT = "import sys; sys.path[:] = {}; from samestep.node import agent; agent.main()"


def start_ranks(spec: RunSpec, num_nodes: int) -> None:
    """Become the agent of several ranks, if the Trainer has several devices here."""
    num = num_processes(spec.accelerator, spec.devices, num_nodes)
    if num > 1:
        # It imports torch, which nobody else here needs.
        from samestep.ranks import run_dirs

        program = this_program()
        run_dirs.hand_on()
        device_option.name_to_ranks(spec.devices)
        become_agent(program, num, run_id=spec.run_id)


def num_processes(accelerator: str, devices: Any, num_nodes: int) -> int:
    """Return how many processes to start here for these arguments of the Trainer.

    It is 1 under torchrun, which has started them all.
    """
    if environment.under_torchrun():
        # The ranks of our own agent see the GPUs that are named, and no others.
        if environment.variable(environment.RUN_DIRS) is None:
            device_option.check_named(devices)
        return 1
    plan = environment.verify_plan()
    if plan is not None:
        # Each experiment of `samestep verify` has its own number, whatever the command says.
        return int(plan["devices"])
    if num_nodes > 1:
        raise ConfigError(
            f"{setting('num_nodes', num_nodes)}: several nodes are started by torchrun; on each of "
            f"them:\n  torchrun --nnodes={num_nodes} --nproc-per-node={devices} --node-rank=N "
            f"--master-addr=NODE_0 {Path(sys.argv[0]).name} ..."
        )
    return device_option.count(accelerator, devices)


def interpreter_options() -> list[str]:
    """Options of this interpreter, such as ``-O``, ``-W`` and ``-X``."""
    # As multiprocessing hands them on; Python 3.14 has no public name.
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return options


def this_program() -> list[str]:
    """Return what Python runs now: its options, a script or a module, and its arguments.

    A profiler, a debugger or coverage may run the script. The ranks run it without them.
    """
    options = interpreter_options()
    main = find_main()
    module = getattr(main.get("__spec__"), "name", "__main__")
    # Python has a spec with another name only for `python -m package.module`. Its file alone would
    # not do: a script finds no relative imports.
    if module != "__main__":
        return [*options, "-m", module.removesuffix(".__main__"), *sys.argv[1:]]
    file = main.get("__file__")
    # A notebook, `python -c` and a script on stdin have none that could be read again.
    if file is not None:
        # What is in an archive has a path in it, which is no file.
        for path in (Path(file), Path(sys.argv[0])):
            if path.is_file():
                return [*options, str(path.absolute()), *sys.argv[1:]]
    raise ConfigError(
        f"{option('devices')}: several processes run the program again, and this one has no file: "
        f"it is a notebook, python -c or stdin; save it as a script, or use {setting('devices', 1)}"
    )


def find_main() -> Mapping[str, Any]:
    """The names of the module that is run as ``__main__``."""
    # ``sys.modules`` is not enough: it keeps the profiler of `python -m cProfile script.py`, which
    # runs the script in names of its own. So the innermost code that is called so counts.
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__":
            return frame.f_globals
        frame = frame.f_back
    # The Trainer is made in a thread.
    return vars(sys.modules["__main__"])


def become_agent(program: Sequence[str], num_processes: int, *, run_id: str) -> NoReturn:
    """Replace this process by the agent of ranks that run ``program``; it keeps its process id.

    The agent has the variables, the folder and the standard streams of this process, and nothing
    else of it: no ``finally`` and no ``atexit`` of the script runs here.
    """
    code = AGENT.format([str(entry) for entry in sys.path])
    command = [sys.executable, *interpreter_options(), "-c", code, str(num_processes), run_id]
    command += program
    flush_files()
    # A prompt, such as that of IPython after `%run script.py`, continues when the ranks have ended.
    if sys.flags.interactive or hasattr(sys, "ps1"):
        wait_for_agent(subprocess.Popen(command))
    os.execv(sys.executable, command)


def flush_files() -> None:
    """Write what this process has put into open files: a process that is replaced never does."""
    for item in gc.get_objects():
        # Not ``isinstance``, which asks the objects themselves for their class.
        if issubclass(type(item), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            # It is closed, or its reader has gone.
            with suppress(OSError, ValueError):
                item.flush()


def wait_for_agent(agent: "subprocess.Popen[bytes]") -> NoReturn:
    """Leave the script with the exit code of the agent when the agent has ended."""
    while True:
        # Ctrl-C reaches the agent as well, whose ranks save before they end.
        with suppress(KeyboardInterrupt):
            sys.exit(agent.wait())
