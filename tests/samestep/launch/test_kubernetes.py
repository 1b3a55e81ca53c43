"""How kubectl is called. What a cluster does is asked of real servers, in tests/labs/servers."""

import os

import pytest
from omegaconf import OmegaConf

from samestep.errors import RunError
from samestep.launch import kubectl
from tests import launching
from tests.conftest import ROOT, run

LAUNCH = (str(ROOT / "tests/samestep_here.py"), "launch")
WORDS = ["cluster=k8s", "cluster.image=ghcr.io/me/project:1.2.3", "trainer.num_nodes=2"]


@pytest.mark.program
def test_check_and_submit_without_kubectl_and_without_a_cluster(tmp_path):
    checked = run(*LAUNCH, *WORDS, "--check", KUBECONFIG=str(tmp_path / "none"))
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "no cluster was checked; kubectl knows no cluster" in checked.stdout
    for words, exit_code in ((["--check"], 0), ([], 1)):
        done = launching.launch(*WORDS, *words, PATH=str(tmp_path), RUN_ID="mine")
        assert done.returncode == exit_code
        said = done.stderr if exit_code else done.stdout
        assert "kubectl: no such command on this machine" in said


def test_the_namespace_is_given_to_kubectl_only_if_there_is_one():
    without, with_one = (
        OmegaConf.create({"cluster": {"namespace": namespace}}) for namespace in (None, "ml")
    )
    assert kubectl.build_command(without, "get", "pods") == ["kubectl", "get", "pods"]
    assert kubectl.build_command(with_one, "get", "pods") == ["kubectl", "-n", "ml", "get", "pods"]


@pytest.mark.parametrize(
    ("stderr", "kind"),
    [
        ("error: current-context is not set", kubectl.NoAnswerError),
        ("dial tcp 10.0.0.1:6443: connect: connection refused", kubectl.NoAnswerError),
        ('error: context "x" does not exist', kubectl.LoginError),
        ("error: You must be logged in to the server (Unauthorized)", kubectl.LoginError),
        ("error: something else", RunError),
        ('(Forbidden): pods "x" is forbidden: exceeded quota: small', kubectl.QuotaError),
        ("Error from server (AlreadyExists): a exists", kubectl.AlreadyExistsError),
        ("Error from server (AlreadyExists): a\nError from server (Forbidden): b", RunError),
    ],
)  # fmt: skip
def test_the_kind_of_an_error_says_what_to_do_about_it(stderr, kind):
    """Without a cluster --check ends with 0; with a wrong login it does not."""
    assert type(kubectl.build_error(stderr)) is kind


@pytest.mark.program
def test_a_kubectl_that_hangs_is_ended(tmp_path, monkeypatch):
    (tmp_path / "kubectl").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(kubectl, "HANGS_S", 1)
    cfg = OmegaConf.create({"cluster": {"namespace": None}})
    with pytest.raises(RunError, match="kubectl get: no answer in 2 seconds"):
        kubectl.call(cfg, "get", "pods", timeout_s=1)
