"""The claim of the volume, and the Job that fills it; tests/labs/servers/test_data.py runs both."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from library.tests.programs import PATIENCE_S
from samestep.launch import check as rules
from samestep.launch import main, volume
from tests import mirror
from tests.conftest import ROOT, environment
from tests.launching import launch
from tests.samestep.launch.test_targets import pod

WORDS = ["cluster=k8s", "cluster.image=ghcr.io/me/project:1.2.3"]
SIZE = "cluster.volume_size=20Gi"


def rendered(*words: str):
    cfg, documents = main.prepare(words, is_data=True)
    assert list(rules.faults(cfg, documents)) == []
    return documents


def test_the_data_are_prepared_in_the_pod_that_trains():
    words = ["cluster.pull_secret=ghcr", "cluster.user=1234", "cluster.secret=keys"]
    (job,) = rendered("cluster=k8s", "data=mnist", "trainer.num_nodes=2", *words)
    assert job["metadata"]["name"] == "data-mnist"
    ours, theirs = job["spec"]["template"], pod("k8s-cpu", *words)
    container, trains = ours["spec"]["containers"][0], theirs["spec"]["containers"][0]
    assert container.pop("command") == ["python", "scripts/prepare_data.py"]
    assert (ROOT / "scripts/prepare_data.py").is_file()
    given = ["cluster=k8s", "data=mnist", "trainer.num_nodes=2", *words]
    assert container.pop("args") == given
    assert theirs["spec"].pop("subdomain") == "cifar"
    for key in ("args", "env"):
        trains.pop(key)
    assert container.pop("env") == [{"name": "RUN_ID", "value": "data-mnist"}]
    assert (ours.pop("metadata") | theirs.pop("metadata")).keys() == {"labels", "annotations"}
    assert ours == theirs
    assert ours["spec"]["imagePullSecrets"] == [{"name": "ghcr"}]


def test_a_claim_is_made_only_if_it_has_a_size():
    assert [item["kind"] for item in rendered("cluster=k8s")] == ["Job"]
    place = ["cluster.volume=team", "cluster.storage_class=fast", "cluster.namespace=ml"]
    claim, _ = rendered("cluster=k8s", SIZE, "cluster.access_mode=ReadWriteOnce", *place)
    assert claim["kind"] == "PersistentVolumeClaim"
    assert (claim["metadata"]["name"], claim["metadata"]["namespace"]) == ("team", "ml")
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "20Gi"}},
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster=swarm"], "cluster=swarm --data: only cluster=k8s fills a volume"),
        (["cluster.volume=null"], "cluster.volume=null: --data fills a volume"),
        (["cluster.image=registry.example.com/project:1"], "is only an example"),
    ],
)
def test_what_cannot_be_filled_is_refused_with_one_line(words, message):
    result = launch(*WORDS, *words, "--data")
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


UNSHARE = """
import ctypes, os, runpy, signal, sys
assert ctypes.CDLL(None).unshare(0x20000000) == 0  # CLONE_NEWPID: for the next child
child = os.fork()
if child == 0:
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""What ``unshare --pid --fork`` does, as a program that starts from the fork server."""


@pytest.mark.program
@pytest.mark.skipif(
    subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode != 0,
    reason="needs the right to make process namespaces",
)
def test_sigterm_ends_it_although_it_is_process_1(tmp_path):
    (tmp_path / "official").mkdir()
    miniature, began = mirror.mnist(tmp_path / "official"), threading.Event()
    (tmp_path / "unshare.py").write_text(UNSHARE)
    with mirror.serve(tmp_path / "official") as official:
        official.go_on.clear()
        program = [*volume.PROGRAM[1:], *miniature.overrides(tmp_path / "volume", official.url)]
        with subprocess.Popen(
            [sys.executable, str(tmp_path / "unshare.py"), *program],
            cwd=ROOT, env=environment(no_proxy="127.0.0.1"), stderr=subprocess.DEVNULL,
        ) as outside:  # fmt: skip
            while not official.requests:
                assert outside.poll() is None
                began.wait(0.1)
            children = Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text()
            subprocess.run(["kill", f"-{signal.SIGTERM.value}", *children.split()], check=True)
            assert outside.wait(PATIENCE_S) == 143
    assert list((tmp_path / "volume").rglob("*-ubyte")) == []
