"""Mistakes in Jobs that the API server finds by code, not by a schema."""

import pytest

from samestep.launch.check.jobs import check_job
from tests.samestep.launch.check.planting import CONTAINER, POD, composed, found, refused

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


PLANTED = [
    ("podReplacementPolicy", "TerminatingOrFailed", "must be Failed beside a podFailurePolicy"),
    ("backoffLimit", -1, "spec.backoffLimit=-1: must be at least 0"),
    ("ttlSecondsAfterFinished", -1, "spec.ttlSecondsAfterFinished=-1: must be at least 0"),
    ("completions", None, "spec.completions: is missing; an Indexed Job needs it"),
    ("parallelism", 100_001, "spec.parallelism=100001: must be at most 100000 in this Job"),
    ("maxFailedIndexes", 3, "spec.maxFailedIndexes=3: must be at most 2 in this Job"),
    ("completionMode", "NonIndexed", "backoffLimitPerIndex=12: needs completionMode: Indexed"),
    ("completionMode", None, "backoffLimitPerIndex=12: needs completionMode: Indexed"),
    ("completions", 100_001, "maxFailedIndexes: is missing; more than 100000 completions need it"),
    ("podFailurePolicy.rules", 21 * [{"action": "Ignore", "onPodConditions": [{"type": "A"}]}],
     "rules: has 21 rules; must have at most 20"),
    ("podFailurePolicy.rules[0].onPodConditions", [], "must have one of onExitCodes and onPod"),
    ("podFailurePolicy.rules[0].onPodConditions", 21 * [{"type": "A"}], "must have at most 20"),
    ("podFailurePolicy.rules[0].onPodConditions[0].status", "yes", "must be True, False or Unk"),
    ("podFailurePolicy.rules[1].onPodConditions", [{"type": "A"}], "must have one of onExitCodes"),
    ("podFailurePolicy.rules[1].onExitCodes.values", [], "has 0; must have from 1 to 255"),
    ("podFailurePolicy.rules[1].onExitCodes.values", [*range(1, 257)], "has 256; must have from 1"),
    ("podFailurePolicy.rules[1].onExitCodes.values", [0, 1], "must not have 0, which is no fail"),
    ("selector", {"matchLabels": {"a": "b"}}, "spec.selector: must be left out; the cluster gen"),
    ("template.metadata.labels.[batch.kubernetes.io/job-name]", "x", "must be left out"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "value", "message"), PLANTED)
def test_a_mistake_in_a_job_is_found(place, value, message):
    (fault,) = refused(**{f"Job:spec.{place}": value})
    assert message in fault


def test_limits_per_index_belong_together():
    planted = {"Job:spec.backoffLimitPerIndex": None, "Job:spec.maxFailedIndexes": 0}
    (fault,) = refused(**planted)
    assert fault == "spec.maxFailedIndexes: needs backoffLimitPerIndex"
    (fault,) = refused(
        **{
            "Job:spec.backoffLimitPerIndex": None,
            "Job:spec.podFailurePolicy.rules[2].action": "FailIndex",
        }
    )
    assert fault.endswith("rules[2].action=FailIndex: needs backoffLimitPerIndex")


@pytest.mark.parametrize(("completions", "length"), [(2, 61), (1001, 58)])
def test_the_host_name_of_the_last_pod_fits(completions, length):
    def faults(length):
        numbers = {"Job:spec.completions": completions, "Job:spec.parallelism": completions}
        return refused(**numbers, **{"Job:metadata.name": "a" * length})

    assert faults(length) == []
    (fault,) = faults(length + 1)
    assert "its last pod would have the host name" in fault
    assert "of 64 characters" in fault
    assert "choose a RUN_ID that is 1 shorter" in fault


def test_a_name_with_a_dot_is_no_host_name():
    (fault,) = refused(**{"Job:metadata.name": "a.b"})
    assert "its last pod would have the host name a.b-1" in fault
