"""How kubectl is called. What a cluster does is asked of real servers, in tests/servers."""

import os

import pytest
from omegaconf import OmegaConf

from samestep.errors import RunError
from samestep.launch import kubectl
from tests import launching
from tests.conftest import ROOT, run

LAUNCH = (str(ROOT / "tests/samestep_here.py"), "launch")
WORDS = ["cluster=k8s", "cluster.image=ghcr.io/me/project:1.2.3", "trainer.num_nodes=2"]


def test_check_needs_no_cluster(tmp_path):
    result = run(*LAUNCH, *WORDS, "--check", KUBECONFIG=str(tmp_path / "none"))
    assert (result.returncode, result.stderr) == (0, "")
    assert "no cluster was checked; kubectl knows no cluster" in result.stdout


def test_check_and_submit_without_kubectl(tmp_path):
    result = run(*LAUNCH, *WORDS, "--check", PATH=str(tmp_path))
    assert result.returncode == 0
    assert "kubectl: no such command on this machine" in result.stdout
    result = run(*LAUNCH, *WORDS, PATH=str(tmp_path))
    assert result.returncode == 1
    assert "kubectl: no such command on this machine" in result.stderr


def test_the_image_of_the_example_is_not_submitted(tmp_path):
    words = ["cluster=k8s", "cluster.image=registry.example.com/project:0.1.0"]
    result = launching.launch(*words, cwd=tmp_path, RUN_ID="mine")
    assert result.returncode == 2
    assert "is only an example" in result.stderr


def test_the_namespace_is_given_to_kubectl_only_if_there_is_one():
    without, with_one = (
        OmegaConf.create({"cluster": {"namespace": namespace}}) for namespace in (None, "ml")
    )
    assert kubectl.build_command(without, "get", "pods") == ["kubectl", "get", "pods"]
    assert kubectl.build_command(with_one, "get", "pods") == ["kubectl", "-n", "ml", "get", "pods"]


def test_a_kubectl_that_hangs_is_ended(tmp_path, monkeypatch):
    (tmp_path / "kubectl").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(kubectl, "HANGS_S", 1)
    cfg = OmegaConf.create({"cluster": {"namespace": None}})
    with pytest.raises(RunError, match="kubectl get: no answer in 2 seconds"):
        kubectl.call(cfg, "get", "pods", timeout_s=1)
