"""Shell completion, as bash asks for it."""

import shlex
import subprocess
import sys

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
        (["scripts/launch.py", "action=check", "cluster=k8"], ["cluster=k8s"]),
        (["scripts/sweep.py", "n_trials=3", "sweep=digits"], ["sweep=digits_lr"]),
        (["scripts/upload.py", "mod"], [""]),  # it must not be started; bash completes files
    ],
)
def test_words_are_completed(words: list[str], expected: list[str]):
    script = ASK.format(words=shlex.join([sys.executable, *words]))
    done = subprocess.run(
        ["bash", "--norc", "-c", script], cwd=ROOT, env=environment(), timeout=60,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.splitlines() == expected
