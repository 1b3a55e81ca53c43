"""Shell completion, as bash asks for it."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, environment

ASK = """
source scripts/completion.bash
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMP_LINE="${{COMP_WORDS[*]}}"
_samestep_complete
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py", "model=ml"], ["model=mlp"]),
        (["train.py", "model=mlp", "trainer.max_t"], ["trainer.max_time="]),
        (["runs", "mod"], [""]),
        (["launch", "--check", "cluster=k8"], ["cluster=k8s"]),
        (["sweep", "n_trials=3", "sweep=digits"], ["sweep=digits_lr"]),
        (["scripts/predict.py", "mod"], [""]),  # it must not be started; bash completes files
    ],
)
def test_words_are_completed(words: list[str], expected: list[str]):
    is_script = words[0].endswith(".py")
    program = sys.executable if is_script else str(Path(sys.executable).with_name("samestep"))
    script = ASK.format(words=shlex.join([program, *words]))
    done = subprocess.run(
        ["bash", "--norc", "-c", script], cwd=ROOT, env=environment(), timeout=60,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.splitlines() == expected
