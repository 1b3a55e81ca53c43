"""Kubeflow: the real SDK and kubectl, against a server that checks what it gets by the schemas."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.apiserver import Refusal, Server, serve
from tests.conftest import ROOT, run

pytest.importorskip("kubeflow", reason="pip install project[kubeflow]")
pytestmark = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")

LAUNCH = str(ROOT / "scripts/launch.py")
WORDS = [
    "cluster=kubeflow", "cluster.image=ghcr.io/me/project:1.2.3", "trainer.num_nodes=2",
    "trainer.devices=2",
]  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Server]:
    with serve() as server:
        server.folder = tmp_path
        server.variables = {
            "KUBECONFIG": server.kubeconfig(tmp_path), "KUBECACHEDIR": str(tmp_path),
        }  # fmt: skip
        yield server


def submit(server, *words):
    return run(
        LAUNCH, *WORDS, *words, "action=submit",
        cwd=server.folder, RUN_ID="mine", **server.variables,
    )  # fmt: skip


def train_job(server):
    (found,) = server.of_kind("TrainJob")
    return found


@pytest.mark.parametrize("accelerator", ["auto", "cpu"])
def test_submit_goes_through_the_sdk_and_runs_what_was_rendered(cluster, accelerator):
    words = [f"trainer.accelerator={accelerator}"]
    result = submit(cluster, *words)
    assert (result.returncode, result.stderr) == (0, "")
    assert "created by Kubeflow's SDK" in result.stdout
    job, (runtime,) = train_job(cluster), cluster.of_kind("TrainingRuntime")
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert job["spec"] == {
        "runtimeRef": {"kind": "TrainingRuntime", "name": "mine"},
        "trainer": {"image": WORDS[1].partition("=")[2], "args": container["args"], "numNodes": 2},
    }
    assert container["args"][-len(WORDS) - 1 :] == [*WORDS, *words]
    assert job["metadata"]["labels"]["app.kubernetes.io/instance"] == "mine"


def test_submit_again_changes_nothing_while_it_runs(cluster):
    submit(cluster)
    before = train_job(cluster)
    result = submit(cluster)
    assert (result.returncode, result.stderr) == (0, "")
    assert "trainjob.trainer.kubeflow.org/mine unchanged" in result.stdout
    assert train_job(cluster) == before
    assert "runs already, with other overrides" in submit(cluster, "seed=1").stderr


@pytest.mark.parametrize(
    ("condition", "says"), [("Failed", "starts again"), ("Complete", "is fin")]
)
def test_submit_again_continues_a_run_that_failed_and_no_other(cluster, condition, says):
    submit(cluster)
    before = train_job(cluster)
    before["status"] = {"conditions": [{"type": condition, "status": "True"}]}
    result = submit(cluster)
    assert (result.returncode, result.stderr) == (0, "")
    assert says in result.stdout
    is_new = train_job(cluster)["metadata"]["uid"] != before["metadata"]["uid"]
    assert is_new == (condition == "Failed")


def test_what_the_cluster_refuses_is_said_in_one_line(cluster):
    def refuse(method, path):
        if method == "POST" and "trainjobs" in path:
            raise Refusal(403, "Forbidden", 'User "me" cannot create resource "trainjobs" in API')

    cluster.refuse = refuse
    result = submit(cluster)
    assert result.returncode == 1
    assert "me may not create trainjobs here" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_cluster_without_trainer_is_said_to_be_one(tmp_path):
    with serve(without=("TrainJob", "TrainingRuntime")) as server:
        result = run(
            LAUNCH, *WORDS, "action=submit", cwd=tmp_path, RUN_ID="mine",
            KUBECONFIG=server.kubeconfig(tmp_path), KUBECACHEDIR=str(tmp_path),
        )  # fmt: skip
    assert result.returncode == 1
    assert "have its operator installed, or choose cluster=k8s" in result.stderr


def test_the_notebook_of_the_guide_works_with_our_image(cluster, tmp_path):
    """The example in docs/clusters/kubeflow.md, and the runtime that Kubeflow Trainer brings."""
    cluster.put({
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "ClusterTrainingRuntime",
        "metadata": {
            "name": "torch-distributed", "labels": {"trainer.kubeflow.org/framework": "torch"},
        },
        "spec": {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": {"spec": {
            "replicatedJobs": [{"name": "node", "template": {
                "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                "spec": {"template": {"spec": {
                    "containers": [{"name": "node", "image": "pytorch/pytorch:2.13.0"}],
                }}},
            }}],
        }}},
    })  # fmt: skip
    text = (ROOT / "docs/clusters/kubeflow.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "notebook.py").write_text(code)
    result = run(str(tmp_path / "notebook.py"), **cluster.variables)
    assert result.returncode == 0, result.stderr
    spec = train_job(cluster)["spec"]
    assert spec["trainer"]["numNodes"] == 4
    assert spec["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == 2
    assert "trainer.num_nodes=4" in spec["trainer"]["args"]
    assert [v["name"] for v in spec["trainer"]["env"]] == ["RUN_ID"]
