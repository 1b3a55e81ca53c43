"""Programs whose output cannot be written, or that are interrupted."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from library.tests.programs import PATIENCE_S, environment

PROGRAM = """
import os, subprocess, sys, time
from samestep.ranks import process
def main():
    for number in range(50):
        print("gr\\u00fcn", number, "x" * 4000, flush=True)
    subprocess.run(["echo", "a child"], check=True)
    print("finished", file=sys.stderr)
    return 3
process.run(main)
"""


def shell(line: str, program: str = PROGRAM, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a shell's line in which ``$PROGRAM`` stands for Python with ``program``."""
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; run() {{ '{sys.executable}' -c \"$TEXT\"; }}; {line}"],
        env=environment(TEXT=program, **variables), capture_output=True, text=True, check=False,
        timeout=PATIENCE_S,
    )  # fmt: skip


@pytest.mark.parametrize("line", ["run >&-", "run > /dev/full", "run <&-"])
def test_output_that_cannot_be_written_ends_nothing(line: str):
    done = shell(line)
    assert (done.returncode, done.stderr) == (3, "finished\n")


def test_stderr_may_be_lost_too():
    assert shell("run >&- 2>&-").returncode == 3
    # Characters that the terminal lacks are escaped.
    done = shell("run 2>&1 | head -1", PYTHONIOENCODING="ascii")
    assert done.returncode == 3
    assert done.stdout.startswith(r"gr\xfcn 0 xxx")


def test_an_unknown_backend_of_matplotlib_is_of_no_importance():
    program = """
from samestep.ranks import process
def main():
    import matplotlib.figure
    return 0
process.run(main)
"""
    done = shell("run", program, MPLBACKEND="foo")
    assert (done.returncode, done.stderr) == (0, "")


SLEEPS = """
import sys, time, threading
from samestep.ranks import process
def main():
    print("ready", flush=True)
    time.sleep(60)
process.run(main, interrupt_at_once={at_once})
"""
SHUTS_DOWN = """
import signal, sys, time, threading
from samestep.ranks import process
def interrupted(*_):
    raise KeyboardInterrupt
def main():
    signal.signal(signal.SIGINT, interrupted)
    threading.Thread(target=outlive_main).start()
    return 0
def outlive_main():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    print("ready", flush=True)
    time.sleep(60)
process.run(main)
"""


@pytest.mark.parametrize(
    ("program", "exit_code"),
    [
        (SLEEPS.format(at_once=False), 130),
        (SLEEPS.format(at_once=True), 130),
        (SHUTS_DOWN, -signal.SIGINT),
    ],
    ids=["within main", "at once", "after main"],
)
def test_an_interrupt_prints_no_traceback(program: str, exit_code: int, tmp_path: Path):
    with (tmp_path / "stderr").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment(), stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == exit_code
    process.stdout.close()
    assert (tmp_path / "stderr").read_text() == ""
