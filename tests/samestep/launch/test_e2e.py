"""The tools of tests/e2e, which CI can only use where there is a cluster."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT, environment
from tests.e2e import cluster


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """A program that hangs as often as the file ``hangs`` says, and then answers."""
    program = tmp_path / "kubectl"
    program.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "print(*sys.argv[1:], file=(folder / 'calls').open('a'))\n"
        "hangs = int((folder / 'hangs').read_text())\n"
        "(folder / 'hangs').write_text(str(hangs - 1))\n"
        "if hangs > 0: time.sleep(60)\n"
        "answer = folder / 'answer'\n"
        "print(answer.read_text() if answer.exists() else '', end='')\n"
        "refusal = folder / 'refusal'\n"
        "if refusal.exists(): sys.exit(refusal.read_text())\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "hangs").write_text("0")
    return tmp_path


def test_a_call_that_hangs_is_tried_again(kubectl):
    (kubectl / "hangs").write_text("1")
    (kubectl / "answer").write_text("pods")
    assert cluster.kubectl("get", "pods", timeout=3) == "pods"
    (kubectl / "hangs").write_text("1")
    (kubectl / "refusal").write_text('Error from server (AlreadyExists): pods "x" already exists')
    assert cluster.kubectl("create", timeout=3) == "pods"
    with pytest.raises(AssertionError, match="AlreadyExists"):
        cluster.kubectl("create", timeout=3)


def test_a_command_in_which_kubectl_got_no_answer_is_tried_again(monkeypatch):
    answers = [(1, "error: kubectl get: no answer in 90 seconds"), (0, "Job e2e-1: runs")]
    monkeypatch.setattr(cluster.Cluster, "samestep_once", lambda *_: answers.pop(0))
    there = cluster.Cluster("x:1", "Never", "ns", "runs")
    assert there.samestep("status", "e2e-1") == "Job e2e-1: runs"
    answers = [(1, "error: there is no such run"), (0, "")]
    with pytest.raises(AssertionError, match="no such run"):
        there.samestep("status", "e2e-1")


def test_a_cluster_that_never_answers_is_said_to_be_one(kubectl, monkeypatch):
    monkeypatch.setattr(cluster, "TRIES", 2)
    (kubectl / "hangs").write_text("9")
    with pytest.raises(AssertionError, match="no answer in 2 times 1 s"):
        cluster.kubectl("get", "pods", timeout=1)


def test_it_needs_neither_torch_nor_xdist():
    command = ["-p", "no:xdist", "--confcutdir=tests/e2e", "-q", "tests/e2e"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *command], cwd=ROOT, env=environment(E2E="0"), text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "9 skipped" in done.stdout
