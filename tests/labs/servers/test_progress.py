"""A real training reports its progress to the real Trainer, and its TrainJob shows it."""

import sys

import pytest

from samestep.ranks.environment import TRAINJOB_SERVER
from tests.conftest import ROOT
from tests.labs.servers.conftest import Cluster, Object, until
from tests.samestep.launch.test_entrypoint import TRAIN

pytestmark = pytest.mark.servers
TRAINS = f"""
until [ -e {{folder}}/token ]; do sleep 0.1; done
# What a cluster's DNS and kubelet do: addresses of this machine, and files within the pod.
export PET_MASTER_ADDR=127.0.0.1 HOME={{folder}}
export {TRAINJOB_SERVER}=$(echo ${TRAINJOB_SERVER} | sed 's#//[^:]*#//localhost#')
export KUBEFLOW_TRAINER_SERVER_TOKEN={{folder}}/token
export KUBEFLOW_TRAINER_SERVER_CA_CERT={{folder}}/ca.crt
cd {ROOT}
eval exec {sys.executable} -m samestep.launch.entrypoint $WORDS
"""


def test_a_trainjob_shows_progress_and_metrics(cluster: Cluster) -> None:
    cluster.pods_do(TRAINS.format(folder=cluster.folder))
    words = ["trainer.num_nodes=1", "trainer.devices=2", *TRAIN, f"run_root={cluster.folder}/runs"]
    done = cluster.launch("kubeflow", "mine", *words)
    assert done.returncode == 0, done.stderr
    (pod,) = until(lambda: cluster.pods("mine", "Running"))
    (container,) = pod["spec"]["containers"]
    if not any(variable["name"] == TRAINJOB_SERVER for variable in container["env"]):
        pytest.skip("Trainer's status server is not started: it needs the right to mount")
    project_volume(cluster, pod)

    assert cluster.follow("mine").end()[0] == 0
    # The last report is sent before the process ends, and Trainer keeps it.
    shown = cluster.get("trainjobs", "mine")["status"]["trainerStatus"]
    assert (shown["progressPercentage"], shown["estimatedRemainingSeconds"]) == (100, 0)
    metrics = {metric["name"]: metric["value"] for metric in shown["metrics"]}
    assert metrics["epoch"] == "1"
    assert {"step", "train/loss", "val/accuracy", "test/accuracy"} <= metrics.keys()


def project_volume(cluster: Cluster, pod: Object) -> None:
    """Write the files of the volume that Trainer has added to the pod, as kubelet does."""
    (volume,) = [item["projected"] for item in pod["spec"]["volumes"] if "projected" in item]
    token, authority = volume["sources"]
    of_cluster = cluster.get("configmaps", authority["configMap"]["name"])
    (cluster.folder / "ca.crt").write_text(of_cluster["data"]["ca.crt"])
    bound = {"apiVersion": "v1", "kind": "Pod", "name": pod["metadata"]["name"]}
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {
        "audiences": [token["serviceAccountToken"]["audience"]], "boundObjectRef": bound,
    }}  # fmt: skip
    path = cluster.path_of("serviceaccounts", pod["spec"]["serviceAccountName"])
    answer = cluster.call("POST", f"{path}/token", request)
    assert answer.ok, answer.text
    (cluster.folder / "token.new").write_text(answer.json()["status"]["token"])
    (cluster.folder / "token.new").rename(cluster.folder / "token")
