"""Call ``samestep launch``, ``status``, ``logs`` and ``cancel`` within the process of the tests.

A process of its own would compose each configuration anew, and import the checks again. Processes
of their own are in tests/scripts/test_launch.py, tests/scripts/test_pipes.py and in the tests of
``samestep logs``.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from samestep.command_line import call
from samestep.launch import main as launch_module
from tests.conftest import ROOT, environment


def launch(*words: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """What ``samestep launch`` does with these words and variables, in a folder."""
    return samestep("launch", *words, cwd=cwd, **variables)


def line_of(action: str, run_id: str, *words: str) -> list[str]:
    """The command line that submits, checks or renders a run, or does ``action`` with one."""
    if action in launch_module.COMMANDS:
        return [action, run_id, *words]
    return ["launch", *([] if action == "submit" else [f"--{action}"]), *words]


def samestep(
    command: str, *words: str, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """What a command of this part of ``samestep`` does with these words and variables."""
    main = getattr(launch_module, "main" if command == "launch" else command)
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        before, folder = dict(os.environ), Path.cwd()
        try:
            os.chdir(cwd)
            set_environment(environment(**{"SAMESTEP_PROJECT": str(ROOT)} | variables))
            tell_kubernetes(variables.get("KUBECONFIG", "none"))
            with descriptor_into(1, stdout.fileno()), descriptor_into(2, stderr.fileno()):
                exit_code = call(lambda: main(words))
        finally:
            set_environment(before)
            os.chdir(folder)
        for stream in (stdout, stderr):
            stream.seek(0)
        return subprocess.CompletedProcess(words, exit_code, stdout.read(), stderr.read())


def set_environment(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def tell_kubernetes(place: str) -> None:
    """Tell the client of Kubernetes where its file is; it reads KUBECONFIG when it is imported."""
    for name in ("kubernetes.config", "kubernetes.config.kube_config"):
        if name in sys.modules:
            sys.modules[name].KUBE_CONFIG_DEFAULT_LOCATION = place


@contextmanager
def descriptor_into(number: int, target: int) -> Iterator[None]:
    """Let stdout (1) or stderr (2) be another file, for programs that are started here too."""
    name = {1: "stdout", 2: "stderr"}[number]
    stream, copy = getattr(sys, name), os.dup(number)
    os.dup2(target, number)
    try:
        with open(number, "w", buffering=1, closefd=False) as replacement:
            setattr(sys, name, replacement)
            yield
    finally:
        setattr(sys, name, stream)
        os.dup2(copy, number)
        os.close(copy)
