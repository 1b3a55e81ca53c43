"""Programs whose output cannot be written, or that are interrupted."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tqdm import tqdm

from library.tests.programs import PATIENCE_S, environment
from samestep.ranks import output
from samestep.ranks.interrupts import INTERRUPTED

PROGRAM = """
import os, subprocess, sys, time
from samestep.ranks import interrupts, process
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


@pytest.mark.program
@pytest.mark.parametrize("line", ["run >&-", "run > /dev/full", "run <&-"])
def test_output_that_cannot_be_written_ends_nothing(line: str):
    done = shell(line)
    assert (done.returncode, done.stderr) == (3, "finished\n")


@pytest.mark.program
def test_stderr_may_be_lost_too():
    assert shell("run >&- 2>&-").returncode == 3
    # Characters that the terminal lacks are escaped.
    done = shell("run 2>&1 | head -1", PYTHONIOENCODING="ascii")
    assert done.returncode == 3
    assert done.stdout.startswith(r"gr\xfcn 0 xxx")


@pytest.mark.program
def test_an_unknown_backend_of_matplotlib_is_of_no_importance():
    program = """
import os
from samestep.ranks import interrupts, process
def main():
    print(os.environ["MPLBACKEND"])
    return 0
process.run(main)
"""
    done = shell("run", program, MPLBACKEND="foo")
    assert (done.returncode, done.stdout, done.stderr) == (0, "agg\n", "")


def test_what_is_said_stands_above_an_open_bar(capsys):
    with tqdm(total=2, file=sys.stdout) as bar:
        bar.update()
        output.say("Note: mine")
    assert re.search(r"\r *\rNote: mine\n", capsys.readouterr().out)


SLEEPS = """
import sys, time, threading
from samestep.ranks import interrupts, process
def main():
    {before}
    print("ready", flush=True)
    time.sleep(60)
process.run(main)
"""
HOOK = """
import time
from samestep import command_line
from samestep.ranks import failure
failure.ErrorHook.install()
def wait():
    print("ready", flush=True)
    time.sleep(60)
{script}
"""
SHUTS_DOWN = """
import signal, sys, time, threading
from samestep.ranks import interrupts, process
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


@pytest.mark.program
@pytest.mark.parametrize(
    ("program", "exit_code", "text"),
    [
        (SLEEPS.format(before=""), 130, ""),
        (SLEEPS.format(before="interrupts.interrupt_at_once()"), 130, f"{INTERRUPTED}\n"),
        (SHUTS_DOWN, -signal.SIGINT, ""),
        (HOOK.format(script="command_line.call(wait)"), 130, f"{INTERRUPTED}\n"),
        (HOOK.format(script="wait()"), -signal.SIGINT, "Traceback"),
    ],
    ids=["within main", "at once", "after main", "in our code", "in the script"],
)
def test_an_interrupt_prints_no_traceback_of_ours(
    program: str, exit_code: int, text: str, tmp_path: Path
):
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
    printed, _, _ = (tmp_path / "stderr").read_text().partition(" (most recent call last)")
    assert printed == text
