"""Clusters with commands of their own: a run touches only what it has made.

The programs are in memory. A real swarm: test_swarm_cluster.py.
"""

import functools
import json
import subprocess

import pytest

from samestep.errors import ConfigError, RunError
from samestep.hydra.compose import check
from samestep.launch import commands, ownership, render
from tests.launching import line_of, samestep

WORDS = {
    "swarm": ["cluster=swarm"],
    "runai": ["cluster=runai"],
    "runai-v1": ["cluster=runai", "cluster.cli=v1"],
    "flyte": ["cluster=flyte"],
}
ACTIONS = ("submit", "status", "logs", "cancel")


def print_found(target, labels):
    """What the program of a target prints about an object with these labels."""
    if target == "swarm":
        return json.dumps({"com.docker.stack.namespace": "web"} | labels, separators=(",", ":"))
    if target == "runai":
        pairs = [{"name": name, "value": value} for name, value in labels.items()]
        return "A new version exists.\n" + json.dumps({"name": "web", "labels": pairs}, indent=2)
    if target == "runai-v1":
        return json.dumps({"kind": "PyTorchJob", "metadata": {"labels": labels}}, indent=4)
    return json.dumps({"id": {"name": "web"}, "spec": {"labels": {"values": labels}}}, indent="\t")


def own(target):
    """The labels of the run ``web`` on a target."""
    name = target.partition("-")[0]
    return {"samestep/run": "web", "samestep/project": "project", "samestep/target": name}


class Programs:
    """Takes the place of ``subprocess`` and ``shutil``; answers commands that find.

    Attributes:
        found: what a command that finds prints.
        error: what it prints if it fails.
        missing: the program that is not installed.
        done: the other commands.
    """

    def __init__(self):
        self.found = self.error = self.missing = ""
        self.done = []

    def run(self, command, **options):
        if options.get("capture_output"):
            code = int(bool(self.error))
            return subprocess.CompletedProcess(command, code, self.found, self.error)
        self.done.append(command)
        return subprocess.CompletedProcess(command, 0)

    def which(self, program):
        return None if program == self.missing else f"/usr/bin/{program}"


@pytest.fixture
def programs(monkeypatch):
    fake = Programs()
    monkeypatch.setattr(commands, "subprocess", fake)
    monkeypatch.setattr(commands, "shutil", fake)
    return fake


@functools.cache
def compose(target):
    """The configuration and the manifests of a run ``web``."""
    cfg = check([*WORDS[target], "cluster.image=ours:1"])
    cfg.run_id = "web"
    manifests = render.render(cfg, []) if cfg.cluster.manifest else []
    return cfg, manifests


def call(action, target, *overrides):
    cfg, manifests = compose(target)
    return commands.call(action, cfg, overrides, manifests)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (None, "the cluster has another object web, which is of no run of samestep; choose"),
        ({"samestep/project": "other"}, "object web belongs to the run web of the project other; "),
        ({"samestep/target": "k8s"}, "is a run with cluster=k8s, and a name is one run on all "),
    ],
)
@pytest.mark.parametrize("target", WORDS)
def test_what_a_stranger_has_made_stays(programs, target, changed, said):
    programs.found = print_found(target, {} if changed is None else own(target) | changed)
    for action in ACTIONS if changed is None else ("cancel",):
        with pytest.raises(ConfigError, match=f"^web: {said}") as error:
            call(action, target)
        assert "choose another RUN_ID" in str(error.value)
    assert programs.done == []


def test_what_is_a_strangers_is_said_in_one_line(programs, tmp_path):
    programs.found = print_found("swarm", {})
    for action in ("submit", "cancel"):
        words = [*WORDS["swarm"], "cluster.image=ours:1"]
        done = samestep(*line_of(action, "web", *words), cwd=tmp_path, RUN_ID="web")
        assert (done.returncode, done.stdout) == (2, "")
        assert "web: the cluster has another object web" in done.stderr
        assert done.stderr.count("\n") == 1
    assert programs.done == []


@pytest.mark.parametrize("target", WORDS)
def test_a_run_is_the_same_with_other_overrides(programs, target):
    """Its labels are those that its submit has given it."""
    cfg, manifests = compose(target)
    submitted = render.text(manifests) if manifests else " ".join(render.command(cfg, [], "submit"))
    assert ownership.read_labels(submitted) == own(target)
    programs.found = print_found(target, own(target))
    expected = []
    for action in ("submit", "cancel"):
        assert call(action, target, "seed=7") == 0
        expected.append(render.command(cfg, ["seed=7"], action))
    assert programs.done == expected


def test_a_stack_that_is_partly_a_strangers_stays(programs):
    """As a deploy of an earlier version has left it."""
    ours = print_found("swarm", own("swarm"))
    programs.found = f"{ours}\n{print_found('swarm', {})}\n{ours}\n"
    for action in ACTIONS:
        with pytest.raises(ConfigError, match="of no run of samestep"):
            call(action, "swarm")
    assert programs.done == []


@pytest.mark.parametrize("target", WORDS)
def test_nothing_is_done_to_what_cannot_be_found(programs, capfd, target):
    """But a new run is submitted."""
    programs.error = "not found: web\n"
    for action in ("status", "logs", "cancel"):
        assert call(action, target) == 1
        assert capfd.readouterr() == ("", "not found: web\n")
    assert programs.done == []
    assert call("submit", target) == 0
    assert len(programs.done) == 1


def test_a_run_is_not_submitted_without_the_program_that_finds_it(programs):
    programs.missing = "flytectl"
    with pytest.raises(RunError, match="flytectl: no such command on this machine"):
        call("submit", "flyte")
    assert programs.done == []
