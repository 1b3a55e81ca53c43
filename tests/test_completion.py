"""Shell completion, as bash, zsh and fish ask for it."""

import os
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from library.tests.programs import PATIENCE_S
from tests.conftest import ROOT, environment

pytestmark = pytest.mark.nightly

BIN = Path(sys.executable).parent
BASH = """
source <({samestep} completion bash)
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMP_LINE="${{COMP_WORDS[*]}}"
_samestep_complete
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def ask(*command: str) -> list[str]:
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), timeout=PATIENCE_S, capture_output=True, text=True
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["python", "train.py", "model=mlp", "trainer.max_t"], ["trainer.max_time="]),
        (["samestep", "sw"], ["sweep"]),
        (["samestep", "sweep", "n_trials=3", "sweep=digits"], ["sweep=digits_lr"]),
        (["samestep", "comp"], ["compare", "completion"]),
        (["python", "scripts/new.py", "mod"], [""]),  # must not start it: a name of a file
    ],
)
def test_bash_completes(words: list[str], expected: list[str]):
    line = shlex.join([str(BIN / words[0]), *words[1:]])
    script = BASH.format(words=line, samestep=BIN / "samestep")
    assert ask("bash", "--norc", "-c", script) == expected


@pytest.mark.skipif(not shutil.which("fish"), reason="apt-get install fish")
@pytest.mark.parametrize(("line", "expected"), [("python train.py model=ml", "model=mlp")])
def test_fish_completes(line: str, expected: str):
    script = f"{BIN}/samestep completion fish | source; complete -C '{BIN}/{line}'"
    assert ask("fish", "--no-config", "-c", script) == [expected]


@pytest.mark.skipif(not shutil.which("zsh"), reason="apt-get install zsh")
@pytest.mark.parametrize(("line", "expected"), [("python train.py model=ml", "model=mlp")])
def test_zsh_completes(line: str, expected: str, tmp_path: Path):
    """In a terminal, because its completion works in its line editor only."""
    load = f"source <({BIN}/samestep completion zsh)"
    start = f"autoload -U compinit; compinit -u -D; {load}; PS1='> '"
    (tmp_path / ".zshrc").write_text(f"{start}\necho ready\n")
    variables = {**environment(), "ZDOTDIR": str(tmp_path), "TERM": "dumb"}
    ours, theirs = os.openpty()
    command = ["setsid", "--ctty", "zsh", "-i"]
    with subprocess.Popen(
        command, cwd=ROOT, env=variables, stdin=theirs, stdout=theirs, stderr=theirs
    ) as shell:
        try:
            read_until(ours, "ready")
            os.write(ours, f"{BIN}/{line}\t".encode())
            read_until(ours, expected)
        finally:
            shell.kill()
            os.close(ours)
            os.close(theirs)


def read_until(terminal: int, text: str) -> None:
    seen, end = "", time.monotonic() + PATIENCE_S
    while text not in seen:
        assert select.select([terminal], [], [], max(0, end - time.monotonic()))[0], seen
        seen += os.read(terminal, 4096).decode()
