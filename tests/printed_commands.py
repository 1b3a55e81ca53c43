"""Every command that README.md and docs/ print in a block, ready to be taken apart or typed."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import NamedTuple

from tests.conftest import ROOT, environment, run

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
SHELLS = ("", "sh", "bash", "console")  # other fences hold Python or YAML
OUTPUT = ("error: ", "{")  # how lines begin that a command prints
SHELL_WORDS = ("cd", "do", "done", "for")
VARIABLE = re.compile(r"[A-Z_]\w*=")


class Command(NamedTuple):
    """A command of a shell, with the variables before it and without what it is piped into."""

    page: str
    variables: dict[str, str]
    words: list[str]

    @property
    def program(self) -> str:
        """What is run: ``samestep launch``, ``scripts/new.py``; the first word of others."""
        return " ".join(self.words[slice(*self.place)])

    @property
    def arguments(self) -> list[str]:
        return self.words[self.place[1] :]

    @property
    def place(self) -> tuple[int, int]:
        """Between which words the program is named, behind Python or torchrun."""
        if "samestep" in self.words[:-1]:
            start = self.words.index("samestep")
            return start, start + 2
        starts_python = self.words[0] in ("python", "torchrun")
        scripts = [number for number, word in enumerate(self.words) if word.endswith(".py")]
        start = scripts[0] if starts_python and scripts else 0
        return start, start + 1

    @property
    def text(self) -> str:
        return " ".join([*(f"{k}={v}" for k, v in self.variables.items()), *self.words])


def find_blocks(page: Path) -> Iterator[list[str]]:
    """The lines of each block of code that is not Python or YAML."""
    text = re.sub(r"<!--.*?-->\n?", "", page.read_text())
    for language, block in FENCE.findall(text):
        if language in SHELLS:
            yield block.splitlines()
    block_lines: list[str] = []
    for line in [*FENCE.sub("", text).splitlines(), "end"]:
        # Four columns, or six in a list.
        if line.startswith("    ") or (block_lines and not line.strip()):
            block_lines.append(line)
        elif block_lines:
            yield "\n".join(block_lines).rstrip().splitlines()
            block_lines = []


def find_lines(page: Path) -> Iterator[list[tuple[str, str]]]:
    """The lines to type of each block, and the errors that are shown below them."""
    for block in find_blocks(page):
        error_of = {}
        for raw, below in zip(block, [*block[1:], ""], strict=True):
            if below.strip().startswith("error: "):
                error_of[raw.strip().removeprefix("$ ")] = below.strip()
        lines = []
        for line in join_lines(block):
            # Less what explains it.
            command = re.sub(r"  +(# |\[).*$", "", line)
            lines.append((command, error_of.get(line, "")))
        yield lines


def join_lines(lines: list[str]) -> Iterator[str]:
    """Whole commands: with their continued lines, open quotes and here-documents."""
    rest = [line.strip().removeprefix("$ ") for line in lines]
    while rest:
        command = rest.pop(0)
        while rest and (command.endswith("\\") or not is_closed(command)):
            command = command.removesuffix("\\") + "\n" + rest.pop(0)
        if "<<EOF" in command:
            while rest.pop(0) != "EOF":
                pass
        if command and not command.startswith(OUTPUT):
            yield command


def is_closed(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


def split_commands(page: str, text: str) -> Iterator[Command]:
    """Each simple command of a line: those that ``;``, ``&&`` and ``|`` join, and ``$(...)``."""
    if inner := re.match(r"[A-Z]+=\$\((.*)\)$", text):
        text = inner[1]
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    words: list[str] = []
    for token in [*lexer, ";"]:
        if set(token) <= set(";&|"):
            if words and words[0] not in SHELL_WORDS:
                yield make_command(page, words)
            words = []
        elif token != "do":
            words.append(token)


def make_command(page: str, words: list[str]) -> Command:
    variables = {}
    while words and VARIABLE.match(words[0]):
        name, _, value = words[0].partition("=")
        variables[name] = value
        words = words[1:]
    for sign in (">", "<<EOF"):
        words = words[: words.index(sign)] if sign in words else words
    return Command(page, variables, words)


def find_commands(page: Path) -> Iterator[list[Command]]:
    """The commands of each block of a page."""
    name = page.relative_to(ROOT).as_posix()
    for block in find_blocks(page):
        yield [
            command
            for line in join_lines(block)
            for command in split_commands(name, line)
            if command.words
        ]


QUICK = """\
# @package _global_
trainer:
  accelerator: cpu
  max_epochs: 1
  limit_train_batches: 2
  limit_val_batches: 1
  limit_test_batches: 1
report: false
"""
"""Settings of the reader's machine, with which what is typed takes seconds."""

PYTHON = ("python", "samestep", "torchrun")
SHELL_SIGNS = set(";&|<>()")


def make_quick(project: Path, settings: str = QUICK) -> None:
    """Let every command in this project train as shortly as this, unless it says otherwise."""
    folder = project / "configs/local"
    folder.mkdir()
    (folder / "default.yaml").write_text(settings)


def type_line(line: str, project: Path, **variables: str) -> CompletedProcess[str]:
    """Type a line in the folder of a project.

    Programs in Python start as in other tests, which is faster; a shell executes everything else.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    words = [*lexer]
    target = None
    if words[-2:-1] == [">"]:
        words, target = words[:-2], project / words[-1]
    while VARIABLE.match(words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    variables |= {"PYTHONPATH": f"{project}:{project / 'src'}"}
    is_joined = any(set(word) <= SHELL_SIGNS for word in words)
    if is_joined or words[0] not in PYTHON:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-c", line],
            cwd=project, env=environment(**variables, PATH=path), capture_output=True, text=True,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    start = {"python": [], "samestep": ["-m", "samestep"]}
    words = [*start.get(words[0], ["-m", "torch.distributed.run"]), *words[1:]]
    done = run(*words, cwd=project, **variables)
    if target is not None:
        target.write_text(done.stdout)
    return done
