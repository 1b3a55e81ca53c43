"""The process of a job: its arguments, its output, and whether it still runs."""

import json
import os
import signal
from pathlib import Path

import pytest

from library.tests.programs import PATIENCE_S, until
from samestep.grid.job_process import is_running, start_job

pytestmark = pytest.mark.program

FACTS = """
import json, os, sys
facts = {
    "arguments": sys.argv[1:], "path": sys.path[0], "own": os.environ["OWN"],
    "others": "PATH" in os.environ, "stdin": sys.stdin.read(),
    "leads": os.getsid(0) == os.getpid(),
}
print(json.dumps(facts), flush=True)
print("on stderr", file=sys.stderr)
"""
SLEEPS_WITH_A_CHILD = """
import os, subprocess, sys, time
name = "child" if sys.argv[2:] else "parent"
if name == "parent":
    subprocess.Popen([sys.executable, *sys.argv, "child"])
partial = f"{sys.argv[1]}/{name}.partial"
with open(partial, "w") as file:
    file.write(str(os.getpid()))
os.rename(partial, f"{sys.argv[1]}/{name}")
time.sleep(600)
"""


def start(folder: Path, code: str, *words: str, **variables: str):
    script = folder / "script.py"
    script.write_text(code)
    return start_job([str(script), *words], variables, folder / "log")


def test_a_job_has_arguments_variables_and_a_session_of_its_own(tmp_path: Path):
    assert start(tmp_path, FACTS, "a=b", "c", OWN="mine").wait(PATIENCE_S) == 0
    facts, last = (tmp_path / "log").read_text().splitlines()
    assert json.loads(facts) == {
        "arguments": ["a=b", "c"], "path": str(tmp_path), "own": "mine", "others": True,
        "stdin": "", "leads": True,
    }  # fmt: skip
    assert last == "on stderr"


def test_the_output_of_each_start_is_kept(tmp_path: Path):
    for number in ("1", "2"):
        start(tmp_path, "import sys; print(sys.argv[1])", number).wait(PATIENCE_S)
    assert (tmp_path / "log").read_text() == "1\n2\n"


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL)],
)
def test_the_exit_code_tells_a_signal(tmp_path: Path, code: str, exit_code: int):
    assert start(tmp_path, code).wait(PATIENCE_S) == exit_code


def test_a_job_runs_until_its_last_process_has_ended(tmp_path: Path):
    """A rank may outlive the process that was killed; a second start would make two of it."""
    log = tmp_path / "log"
    assert not is_running(log), "there is no log yet"
    first = start(tmp_path, SLEEPS_WITH_A_CHILD, str(tmp_path))
    until(lambda: (tmp_path / "parent").exists() and (tmp_path / "child").exists())
    first.kill()
    assert first.wait(PATIENCE_S) == -signal.SIGKILL
    assert is_running(log)
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    until(lambda: not is_running(log))
