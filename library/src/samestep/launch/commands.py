"""Submit, follow and cancel a run by the commands of ``k8s/commands``, such as docker's.

A file there has a command for each action, and ``find``: it prints the labels of each object with
the name of the run as JSON that begins a line, and fails if it cannot find out. If one of them is
not the run's, nothing is done.
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from omegaconf import DictConfig

from samestep.errors import ConfigError, RunError
from samestep.launch import ownership, render
from samestep.launch.render import Manifest

DOCUMENT = re.compile(r"^[{[].*?(?=^[{[]|\Z)", re.MULTILINE | re.DOTALL)
"""A document of JSON among others, and among messages."""


def call(
    action: str, cfg: DictConfig, overrides: Sequence[str], manifests: Sequence[Manifest]
) -> int:
    """Do ``action`` by a command of ``k8s/commands``; return its exit code."""
    if action == "check":
        print(f"{cfg.run_id}: no errors found; cluster={cfg.cluster.name} was not checked")
        return 0
    command = render.command(cfg, overrides, action)
    if not command:
        raise ConfigError(
            f"cluster={cfg.cluster.name}: nothing on this machine can {action} its runs; "
            "samestep launch --render prints what to type elsewhere"
        )
    find = render.command(cfg, overrides, "find")
    for program in (command[0], *find[:1]):
        if shutil.which(program) is None:
            raise RunError(
                f"{program}: no such command on this machine; install it, or type elsewhere:\n"
                f"  {shlex.join(command)}"
            )
    if find:
        found = subprocess.run(find, capture_output=True, text=True, check=False)
        # A new run is not found, for which each program has an error of its own. A program that
        # finds nothing because it reaches no server cannot submit the run either.
        if found.returncode and action != "submit":
            print(found.stdout + found.stderr, end="", file=sys.stderr)
            return found.returncode
        reject_foreign(cfg, found.stdout)
    text = render.text(manifests)
    return subprocess.run(command, input=text, text=True, check=False).returncode


def reject_foreign(cfg: DictConfig, found: str) -> None:
    """Raise a ConfigError if an object with the name of the run is not the run's.

    Args:
        cfg: of the run.
        found: what ``find`` has printed.
    """
    ours = dict(render.find_values(cfg, []).pod.identity)
    for document in DOCUMENT.findall(found):
        labels = ownership.read_labels(document)
        if not ours.items() <= labels.items():
            raise ownership.build_conflict(cfg, f"object {cfg.run_id}", labels, ours)
