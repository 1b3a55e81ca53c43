"""Every command may be piped into ``head``: it ends quietly, with its usual exit code."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from library.tests.programs import PATIENCE_S
from tests.conftest import ROOT, environment

pytestmark = pytest.mark.program

SAMESTEP = ("-m", "samestep")
FRESH = ["-Wdefault"]
"""An option of Python: it keeps the fork server of the tests away, which ends in its own way."""


def run_unread(*words: str, both: bool = False) -> tuple[int, str]:
    """Run Python with a stdout, or ``both`` streams, that nobody reads any more.

    Returns:
        The exit code, and what was written to stderr.
    """
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    try:
        done = subprocess.run(
            [sys.executable, *words], stdout=writing_end, cwd=ROOT, env=environment(),
            stderr=writing_end if both else subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
            timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    finally:
        os.close(writing_end)
    return done.returncode, done.stderr or ""


@pytest.mark.parametrize("command", [["scripts/new.py"], SAMESTEP], ids=" ".join)
def test_the_help_of_a_command_may_be_cut_off(command: Sequence[str]):
    """The other scripts end as these do."""
    assert run_unread(*FRESH, *command, "--help") == (0, "")


@pytest.mark.parametrize(
    ("words", "exit_code"),
    [
        ([*SAMESTEP, "launch", "--render", "cluster=k8s"], 0),
        (["train.py", "--cfg", "job"], 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_a_command_prints_may_be_cut_off(words: Sequence[str], exit_code: int):
    assert run_unread(*FRESH, *words, both=True) == (exit_code, "")


def test_what_a_command_with_torch_prints_may_be_cut_off(digits_run: Path):
    evaluate = [*SAMESTEP, "evaluate", str(digits_run), "--format=json"]
    for words in (evaluate, [*SAMESTEP, "doctor"], ["scripts/prepare_data.py", "data=digits"]):
        exit_code, said = run_unread(*words)
        assert exit_code == 0
        assert not {"Traceback", "BrokenPipeError", "Exception"} & set(re.findall(r"\w+", said))
