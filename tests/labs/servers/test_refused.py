"""What the real servers accept of our manifests, and which planted mistakes they refuse.

Rules of Kubernetes stand nowhere in this project: the servers have them.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.labs.servers.conftest import Cluster, documents_of, own_namespace, plant, until

pytestmark = pytest.mark.servers
TARGETS = ("k8s", "jobset", "kubeflow", "pytorchjob", "elastic")
POLICY = "spec.podFailurePolicy.rules"
OF_SET = "spec.failurePolicy.rules"
EXISTS = 'trainingruntimes.trainer.kubeflow.org "mine" already exists'
WORKER = "spec.pytorchReplicaSpecs.Worker"
# One of each kind of judge: the API server's rules and schemas, and each controller's webhook.
REFUSED = [  # target, kind, place, value; and what the server says of it
    ("k8s", "Job", f"{POLICY}.1.onExitCodes.values", [143, 2], "must be ordered"),
    ("k8s", "Job", "spec.backofLimit", 1, 'unknown field "spec.backofLimit"'),
    ("k8s", "NetworkPolicy", "spec.policyTypes", ["Inwards"], "policyTypes"),
    ("elastic", "Deployment", "spec.selector.matchLabels", {"a": "b"}, "does not match template"),
    ("jobset", "JobSet", "metadata.name", "m" * 60, "JobSet name is too long"),
    ("jobset", "JobSet", f"{OF_SET}.1.name", "evicted", "rule names are not unique"),
    ("pytorchjob", "PyTorchJob", f"{WORKER}.template.spec.containers.0.name", "trainer", "pytorch"),
    ("kubeflow", "TrainJob", "spec.runtimeRef.name", "other", "untime"),
    ("kubeflow", "TrainingRuntime", "spec.mlPolicy.mpi", {}, "Only one of the policy"),
]  # fmt: skip


@pytest.fixture(scope="module")
def shared(kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One namespace for all dry runs, with the runtime that the webhook of TrainJobs looks for."""
    with own_namespace(kubeconfig, tmp_path_factory.mktemp("shared")) as here:
        *_, runtime, job = documents_of(here, "kubeflow")
        here.apply(runtime)
        until(lambda: not here.dry_run(job))  # the webhook has seen the runtime
        yield here


def test_planted_mistakes_are_refused(shared: Cluster) -> None:
    for target, kind, place, value, said in REFUSED:
        documents = documents_of(shared, target, run_id="wrong")
        (item,) = [document for document in documents if document["kind"] == kind]
        plant(item, place, value)
        assert said in shared.dry_run(item), (kind, place)


CHOICES: dict[str, list[str]] = {  # values that a user may choose, for random configurations
    "trainer.num_nodes": ["1", "2", "7"],
    "trainer.devices": ["1", "8"],
    "trainer.accelerator": ["cpu", "gpu"],
    "cluster.cpus": ["1", "500m"],
    "cluster.cpu_limit": ["4", "8"],
    "cluster.memory": ["4Gi", "2000M"],
    "cluster.shm": ["64Mi", "1Gi"],
    "cluster.user": ["null", "1000"],
    "cluster.priority_class": ["null"],
    "cluster.queue": ["null", "team"],
    "cluster.pull_secret": ["null", "login"],
    "cluster.secret": ["project", "other"],
    "cluster.volume": ["project", "null"],
    "cluster.node_selector": ["null", "{example.com/gpu: h100}"],
    "cluster.tolerations": ["null", "[{key: gpu, operator: Exists, effect: NoSchedule}]"],
    "cluster.env": ["null", "[{name: NCCL_DEBUG, value: INFO}]"],
    "cluster.backoff_limit": ["0", "12"],
    "cluster.grace_s": ["120", "600"],
    "cluster.image_pull_policy": ["IfNotPresent", "Always"],
    "cluster.download": ["true", "false"],
}  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_a_random_valid_configuration_is_accepted(shared: Cluster, target: str) -> None:
    generator = random.Random(f"{target} 0")
    words = [f"{key}={generator.choice(values)}" for key, values in CHOICES.items()]
    if target == "elastic":
        words = [word for word in words if not word.startswith("trainer.num_nodes")]
    # The webhook of TrainJobs looks for the runtime of this name, which is there.
    documents = documents_of(shared, target, *words)
    assert shared.dry_run(*documents).replace(EXISTS, "") == ""
