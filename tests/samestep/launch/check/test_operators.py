"""Mistakes that the webhooks of JobSet, Trainer and the training operator find by code."""

import pytest

from tests.samestep.launch.check.planting import refused

JOB = "JobSet:spec.replicatedJobs[0]"
RULE = "JobSet:spec.failurePolicy.rules[1]"
STEP = "TrainingRuntime:spec.template.spec.replicatedJobs[0]"
WORKER = "PyTorchJob:spec.pytorchReplicaSpecs.Worker"
PLANTED = [
    ("jobset", "JobSet:spec.network.subdomain", "1a", "network.subdomain=1a: must be at most 63"),
    ("jobset", f"{JOB}.dependsOn", [], "dependsOn: must be left out of the first one"),
    ("jobset", f"{JOB}.replicas", 2**30, "replicas x parallelism=2147483648 must be at most"),
    ("jobset", "JobSet:spec.successPolicy", {"targetReplicatedJobs": ["a"]}, "no replicatedJob a"),
    ("jobset", f"{RULE}.name", "a-b", "rules[1].name=a-b: must be at most 128 of A-Z"),
    ("jobset", f"{RULE}.name", "evicted", "rules: two have the name evicted"),
    ("jobset", f"{RULE}.targetReplicatedJobs", ["x"], "there is no replicatedJob x; there is node"),
    ("jobset", f"{RULE}.onJobFailureReasons", ["Failed"], "Failed is no reason of a Job; reasons"),
    ("kubeflow", f"{STEP}.replicas", 2, "replicatedJobs[0].replicas=2: must be 1"),
    ("kubeflow", "TrainJob:spec.trainer.numProcPerNode", 0, "numProcPerNode=0: must be at least 1"),
    ("kubeflow", "TrainJob:spec.trainer.env", [{"name": "PET_NNODES"}], "PET_NNODES must be left"),
    ("pytorchjob", f"{WORKER}.replicas", 0, "Worker.replicas=0: must be at least 1"),
    ("pytorchjob", f"{WORKER}.template.spec.containers[0].name", "trainer", "the name pytorch; it"),
]  # fmt: skip


def patch_container(**values):
    """The runtimePatches of a TrainJob, as Kubeflow's SDK writes them."""
    pod = {"spec": {"containers": [{"name": "node"} | values]}}
    job = {"name": "node", "template": {"spec": {"template": pod}}}
    spec = {"template": {"spec": {"replicatedJobs": [job]}}}
    return [{"manager": "trainer.kubeflow.org/kubeflow-sdk", "trainingRuntimeSpec": spec}]


def test_a_patch_sets_no_variables_of_the_container_of_a_step():
    place = "TrainJob:spec.runtimePatches"
    mounts = [{"name": "credentials", "mountPath": "/credentials"}]
    assert refused("kubeflow", **{place: patch_container(volumeMounts=mounts)}) == []
    (fault,) = refused("kubeflow", **{place: patch_container(env=[{"name": "A", "value": "1"}])})
    assert fault.endswith("containers[0]: must not have env for the container node")


@pytest.mark.parametrize(("target", "place", "value", "message"), PLANTED)
def test_a_mistake_that_a_webhook_refuses_is_found(target, place, value, message):
    faults = refused(target, **{place: value})
    assert message in faults[0], faults


def test_a_step_of_a_runtime_has_its_container():
    place = f"{STEP}.template.spec.template.spec.containers[0].name"
    assert (
        "the step trainer needs a container with the name node"
        in (refused("kubeflow", **{place: "trainer"})[0])
    )


@pytest.mark.parametrize(
    ("target", "kind"), [("kubeflow", "TrainJob"), ("pytorchjob", "PyTorchJob")]
)
def test_a_name_is_a_name_in_dns(target, kind):
    fault = refused(target, **{f"{kind}:metadata.name": "1-run"})[0]
    assert f"a {kind} must have at most 63 of a-z 0-9 -, the first a letter" in fault


def test_roles_of_a_pytorch_job_are_known():
    role = {"template": {"spec": {"containers": [{"name": "pytorch"}]}}}
    faults = refused("pytorchjob", **{"PyTorchJob:spec.pytorchReplicaSpecs.Chief": role})
    assert faults[0] == "spec.pytorchReplicaSpecs.Chief: must be Master or Worker"
    role["replicas"] = 2
    faults = refused("pytorchjob", **{"PyTorchJob:spec.pytorchReplicaSpecs.Master": role})
    assert "Master.replicas=2: must be at least 1, and 1 for a Master" in faults[0]


@pytest.mark.parametrize(("nodes", "length"), [(10, 48), (1000, 46)])
def test_the_longest_name_of_a_pod_of_a_jobset_fits(nodes, length):
    """<jobset>-node-0-<index>-abcde"""
    spec = f"{JOB}.template.spec"
    numbers = {f"{spec}.completions": nodes, f"{spec}.parallelism": nodes}
    assert refused("jobset", **numbers, **{"JobSet:metadata.name": "a" * length}) == []
    fault = refused("jobset", **numbers, **{"JobSet:metadata.name": "a" * (length + 1)})[0]
    assert "of 64 characters; it must have at most 63" in fault
