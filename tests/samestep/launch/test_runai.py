"""Run:ai: the commands that are executed; a program of the same name takes the place of its own."""

import os

import pytest

from samestep.errors import ConfigError
from samestep.hydra.compose import check
from tests.launching import launch, samestep
from tests.samestep.launch.test_targets import RUNAI, TARGETS, command

OURS = "cluster.image=ours:1"


@pytest.mark.parametrize("name", RUNAI)
def test_runai_gets_options_and_then_the_words_of_the_container(name):
    more = ["seed=1", 'cluster.options=["--node-pools=h100"]']
    words = command(name, *more)
    at = words.index("--")
    assert words[0] == "runai"
    assert "--node-pools=h100" in words[:at]
    assert "RUN_ID=cifar" in " ".join(words[:at])
    assert words[at + 1] == "--nproc-per-node=2"
    assert words[at + 5 : at + 7] == ["run_root=/volume/runs", "data.root=/volume/data"]
    assert words[at + 7 :] == [*TARGETS[name], *more]
    assert ("-g" in words) == (name != "runai-cpu")


@pytest.mark.program
@pytest.mark.parametrize("name", ["runai", "runai-v1"])
def test_runai_is_executed_and_a_run_is_found_by_its_name_alone(name, tmp_path):
    """Also its project, and the command line that Run:ai has."""
    # No workload has the name; test_commands.py has one of a stranger.
    code = 'case "$*" in *--output=json) exit 0;; esac\nprintf "%s\\n" "$@"\nexit $CODE\n'
    for program in ("runai", "kubectl"):
        (tmp_path / program).write_text(f"#!/bin/sh\n{code}")
        (tmp_path / program).chmod(0o755)
    variables = {"RUN_ID": "cifar", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = [*TARGETS[name], OURS, "cluster.project=my team"]
    failed = launch(*words, cwd=tmp_path, **variables, CODE="7")
    assert (failed.returncode, failed.stderr) == (7, "")  # what the command says
    told = ["runai", *failed.stdout.splitlines()]
    assert told == command(name, OURS, "cluster.project=my team")
    result = launch(*words, cwd=tmp_path, **variables, CODE="0")
    assert (result.returncode, result.stderr) == (0, "")
    for action in ("logs", "status", "cancel"):
        line = f"samestep {action} cifar"
        assert f"  {line}\n" in result.stdout
        done = samestep(action, "cifar", cwd=tmp_path, **variables, CODE="3")
        told = ["runai", *done.stdout.splitlines()]
        assert told == command(name, "cluster.project=my team", action=action)
        assert done.returncode == 3


@pytest.mark.program
def test_a_command_that_is_not_there_is_said_to_be_typed_elsewhere(tmp_path):
    words = [*TARGETS["runai"], OURS]
    result = launch(*words, cwd=tmp_path, PATH=str(tmp_path))
    assert result.returncode == 1
    assert "runai: no such command on this machine" in result.stderr


def test_a_version_of_the_command_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="one of v2, v1"):
        check(["cluster=runai", "cluster.cli=v3"])
