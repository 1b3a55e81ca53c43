"""Mistakes in Jobs that the API server finds by code, not by a schema."""

import pytest

from samestep.launch.check.jobs import check_job
from tests.samestep.launch.check.planting import CONTAINER, POD, composed, found

REPLICATED = "spec.replicatedJobs[0].template.spec"
EXIT_CODES = {  # a rule of exit codes in each target that has a podFailurePolicy
    "k8s": "Job:spec.podFailurePolicy.rules[1].onExitCodes",
    "elastic": "Job:spec.podFailurePolicy.rules[1].onExitCodes",
    "jobset": f"JobSet:{REPLICATED}.podFailurePolicy.rules[1].onExitCodes",
    "kubeflow": (
        f"TrainingRuntime:spec.template.{REPLICATED}.podFailurePolicy.rules[1].onExitCodes"
    ),
}


@pytest.mark.parametrize(
    ("policy", "message"),
    [("OnFailure", "restartPolicy=OnFailure: must be Never beside a podFailurePolicy"),
     ("Always", "restartPolicy=Always: must be Never or OnFailure in a Job"),
     (None, "restartPolicy=None: must be Never or OnFailure in a Job")],
)  # fmt: skip
def test_pods_of_a_job_do_not_restart_by_themselves(policy, message):
    (fault,) = found(**{f"Job:{POD}.restartPolicy": policy})
    assert message in fault


def test_a_job_without_a_policy_may_restart_its_containers():
    _, documents = composed()
    job = documents[-1]
    del job["spec"]["podFailurePolicy"]
    job["spec"]["template"]["spec"]["restartPolicy"] = "OnFailure"
    assert list(check_job(job)) == []


@pytest.mark.parametrize("target", EXIT_CODES)
def test_a_policy_names_a_container_of_the_pod(target):
    (fault,) = found(target, **{f"{EXIT_CODES[target]}.containerName": "other"})
    assert "rules[1].onExitCodes.containerName=other: the pod has no such container" in fault


def test_the_container_of_a_pod_has_the_name_that_the_policy_knows():
    faults = found(**{f"Job:{CONTAINER}.name": "other"})
    assert faults
    assert all("containerName=trainer: the pod has no such container" in fault for fault in faults)


@pytest.mark.parametrize("target", EXIT_CODES)
@pytest.mark.parametrize(
    ("values", "ordered"), [([143, 2], "[2, 143]"), ([2, 2], "[2]"), ([3, 1, 3], "[1, 3]")]
)
def test_exit_codes_are_in_order_and_unique(target, values, ordered):
    """The API server of Kubernetes 1.36 refuses others: ``must be ordered``."""
    (fault,) = found(target, **{f"{EXIT_CODES[target]}.values": values})
    assert (
        f"rules[1].onExitCodes.values={values}: must be in ascending order without repeats; "
        f"write {ordered}"
    ) in fault
    assert found(target, **{f"{EXIT_CODES[target]}.values": [2, 15, 143]}) == []
