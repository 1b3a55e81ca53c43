"""The list of runs, by the command."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from library.tests.report.fake import make_run
from samestep.run import record
from tests.conftest import ROOT, environment, run


def test_all_runs_are_listed_and_an_empty_folder_says_so(digits_run: Path, tmp_path: Path):
    listed = run("-m", "samestep", "runs", str(digits_run.parent), "--json")
    (found,) = json.loads(listed.stdout)
    assert found["state"] == "finished"
    empty = run("-m", "samestep", "runs", str(tmp_path))
    assert (empty.returncode, empty.stdout) == (0, f"There is no run in {tmp_path}.\n")
    missing = run("-m", "samestep", "runs", str(tmp_path / "nothing"))
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: ")
    none = run("scripts/runs.py", str(tmp_path), "--last", "0")
    assert (none.returncode, none.stdout) == (2, "")


@pytest.mark.parametrize("ends_by", ["Ctrl-C", "a closed terminal"])
def test_a_list_that_is_watched_follows_the_runs(tmp_path: Path, ends_by: str):
    run_dir = make_run(tmp_path / "one")
    record.update(run_dir, record.FAILED, "no space left")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "samestep", "runs", str(tmp_path), "--watch"],
        cwd=ROOT, stdout=theirs, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        env=environment(COLUMNS="120"),
    ) as watching:  # fmt: skip
        os.close(theirs)
        shown = read_until(ours, "no space left.* ago")
        assert "0.7 val/score" in shown
        record.update(run_dir, record.FINISHED)
        read_until(ours, "finished .* ago")
        if ends_by == "Ctrl-C":
            watching.send_signal(signal.SIGINT)
            read_until(ours, r"\x1b\[\?25h")  # the cursor is visible again
        os.close(ours)
        try:
            error = watching.communicate(timeout=60)[1]
        finally:
            watching.kill()
    assert error == b""
    assert watching.returncode == (130 if ends_by == "Ctrl-C" else 128 + signal.SIGPIPE)


def read_until(terminal: int, pattern: str) -> str:
    """What a terminal shows until it has the pattern; an end of the program is an OSError."""
    shown = ""
    while not re.search(pattern, shown):
        shown += os.read(terminal, 10_000).decode()
    return shown


def test_a_list_is_not_watched_without_a_terminal(tmp_path: Path):
    refused = run("-m", "samestep", "runs", str(tmp_path), "--watch")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: --watch: needs a terminal")
