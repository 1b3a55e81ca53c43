"""A run that a cluster starts again and again, without a new checkpoint, ends."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from samestep.errors import ConfigError
from samestep.launch import entrypoint, starts
from samestep.ranks import environment
from samestep.run import lock, manifest


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "mine"
    path.mkdir()
    (path / "run.json").write_text("{}")
    return path


def test_starts_without_a_new_checkpoint_are_bounded(run_dir, monkeypatch):
    checkpoint = SimpleNamespace(sha256="first")
    monkeypatch.setattr(manifest, "read", lambda path: checkpoint)
    for _ in range(2):
        for _ in range(3):
            starts.reject_endless(run_dir, limit=2)
        checkpoint.sha256 += " and another"
    for _ in range(3):
        starts.reject_endless(run_dir, limit=2)
    with pytest.raises(ConfigError, match="mine: 3 starts in a row have saved no new checkpoint"):
        starts.reject_endless(run_dir, limit=2)
    starts.reject_endless(run_dir, limit=2)  # launched once more


def test_starts_are_not_counted_before_the_run_and_beside_it(run_dir, monkeypatch):
    (run_dir / "run.json").rename(run_dir / "other.json")
    for _ in range(9):
        starts.reject_endless(run_dir, limit=0)
    (run_dir / "other.json").rename(run_dir / "run.json")
    monkeypatch.setattr(lock, "is_held", lambda path: True)
    for _ in range(9):
        starts.reject_endless(run_dir, limit=0)
    assert not (run_dir / starts.FILE).exists()


@pytest.mark.parametrize("number", [0, 1])
def test_the_first_node_asks_before_anything_is_trained(run_dir, monkeypatch, number):
    noted = {"checkpoint": "", "starts": 13}
    (run_dir / starts.FILE).write_text(json.dumps(noted))
    monkeypatch.setattr("samestep.node.rendezvous.resolve_endpoint", trains)
    monkeypatch.setenv("RUN_ID", "mine")
    words = ["cluster=k8s", "trainer.accelerator=cpu", f"run_root={run_dir.parent}"]
    options = ["--nnodes=2", f"--node-rank={number}", "--master-addr=localhost"]
    error, said = (ConfigError, "13 starts in a row") if number == 0 else (Trains, None)
    with pytest.raises(error, match=said):
        entrypoint.train_as_node([*options, *words])


def test_the_ranks_know_how_long_they_have_to_save(tmp_path, monkeypatch):
    def launch(node, program):
        return environment.variable(environment.SHUTDOWN_S)

    monkeypatch.setattr("samestep.node.rendezvous.resolve_endpoint", lambda node: node)
    monkeypatch.setattr("samestep.node.rendezvous.prepare_variables", lambda node: None)
    monkeypatch.setattr("samestep.node.rendezvous.launch", launch)
    for name in ("RUN_ID", environment.ON_CLUSTER, environment.SHUTDOWN_S):
        monkeypatch.setenv(name, "mine")  # so that each is restored
    words = ["cluster=k8s", "trainer.accelerator=cpu", f"run_root={tmp_path}"]
    options = ["--nnodes=1", "--shutdown-timeout=77"]
    assert entrypoint.train_as_node([*options, *words]) == "77"


class Trains(Exception):
    """Nothing has kept the node from training."""


def trains(node):
    raise Trains
