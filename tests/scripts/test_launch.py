"""The command, as a user calls it. What each action does is tested beside its own module."""

import shlex
import subprocess
import sys

import pytest
import yaml

from tests.conftest import ROOT, environment, run
from tests.launching import launch

LAUNCH = ["-m", "samestep", "launch"]


@pytest.mark.program
def test_help_says_what_there_is():
    result = run(*LAUNCH, "--help")
    assert result.returncode == 0
    for flag in ("check", "render", "data"):
        assert f"--{flag} " in result.stdout


@pytest.mark.program
def test_manifests_are_printed_under_the_name_of_the_run():
    result = run(*LAUNCH, "--render", "cluster=k8s", "trainer.num_nodes=2", RUN_ID="mine")
    assert (result.returncode, result.stderr) == (0, "")
    documents = list(yaml.safe_load_all(result.stdout))
    assert {document["metadata"]["name"] for document in documents} == {"mine"}
    (container,) = documents[-1]["spec"]["template"]["spec"]["containers"]
    assert container["args"][-2:] == ["cluster=k8s", "trainer.num_nodes=2"]


def test_two_runs_without_a_name_do_not_meet():
    first, second = (launch("cluster=k8s", "--render").stdout for _ in range(2))
    names = {next(yaml.safe_load_all(text))["metadata"]["name"] for text in (first, second)}
    assert len(names) == 2
    assert all(name.startswith("digits-cnn-") for name in names)


def test_a_name_that_no_cluster_takes_is_not_rendered():
    result = launch("cluster=k8s", "--render", RUN_ID="My_Run")
    assert (result.returncode, result.stdout) == (2, "")
    assert "RUN_ID=My_Run: names things in the cluster, so it must be at most 63" in result.stderr
    assert result.stderr.endswith("for instance RUN_ID=my-run\n")


@pytest.mark.program
def test_what_cannot_be_done_is_refused_with_one_line():
    for words, message in (
        (["cluster=k8s", "--rendr"], "did you mean --render?"),
        (["cluster=local"], "python train.py runs it"),
        (["trainer.num_nodes=2"], "cluster=local: needs no launching"),
        (["cluster=k8s", "trainer.max_epoch=3"], "did you mean trainer.max_epochs=3?"),
        (["cluster=k8s", "cluster.image_pull_policy=never"], "one of IfNotPresent, Always, Never"),
        (["cluster=elastic", "cluster.elasticjob=true"], "cluster.elasticjob=true: no such key"),
    ):
        result = run(*LAUNCH, *words) if words[-1] == "--rendr" else launch(*words)
        assert (result.returncode, result.stdout) == (2, ""), words
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
    result = launch("cluster=k8s", RUN_ID="a/b")
    assert (result.returncode, "RUN_ID=a/b" in result.stderr) == (2, True)


@pytest.mark.program
def test_a_reader_that_goes_away_gets_no_traceback():
    command = shlex.join([sys.executable, *LAUNCH, "cluster=k8s", "--render"])
    result = subprocess.run(
        ["sh", "-c", f"{command} | head -1"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (result.stdout.count("\n"), result.stderr) == (1, "")
