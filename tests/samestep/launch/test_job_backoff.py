"""How long a run waits for its pods after evictions, by the rules of Kubernetes' Job controller."""

import pytest

from tests.conftest import ROOT
from tests.job_controller import End, JobController
from tests.samestep.launch.check.planting import composed

STOPPED, EVICTED = End(143), End(143, is_disrupted=True)
WAITS = {  # pods: seconds after three evictions; the same without backoffLimitPerIndex
    2: ([10, 20, 40], [20, 80, 320]),
    8: ([10, 20, 40], [600, 600, 600]),
    64: ([10, 20, 40], [600, 600, 600]),
}


def rendered_job(num_pods=2, target="k8s"):
    job = next(item for item in composed(target)[1] if item["kind"] == "Job")
    if "completions" in job["spec"]:
        job["spec"] |= {"completions": num_pods, "parallelism": num_pods}
    return job


def evict(controller, num_pods):
    """One pod is evicted, and all ranks stop together; the longest wait of a pod."""
    ends = {0: EVICTED} | dict.fromkeys(range(1, num_pods), STOPPED)
    return max(controller.end_pods(ends).values())


@pytest.mark.parametrize("num_pods", WAITS)
def test_evictions_cost_as_little_with_many_pods_as_with_one(num_pods):
    with_limit, without_limit = WAITS[num_pods]
    job = rendered_job(num_pods)
    controller = JobController(job)
    assert [evict(controller, num_pods) for _ in range(3)] == with_limit
    del job["spec"]["backoffLimitPerIndex"]
    controller = JobController(job)
    assert [evict(controller, num_pods) for _ in range(3)] == without_limit


def test_the_page_has_the_figures_of_the_model():
    text = (ROOT / "docs/clusters/k8s.md").read_text()
    for num_pods, (with_limit, without_limit) in WAITS.items():
        cells = [", ".join(map(str, waits)) for waits in (with_limit, without_limit)]
        assert f"| {num_pods} | {cells[0]} | {cells[1]} |" in text


def test_evictions_never_fail_a_job():
    controller = JobController(rendered_job(8))
    for _ in range(100):
        assert evict(controller, 8) <= 600
    assert controller.reason == ""


def test_a_wrong_configuration_fails_the_job_at_once():
    controller = JobController(rendered_job())
    assert controller.end_pods({1: End(2)}) == {}
    assert controller.reason == "PodFailurePolicy"


@pytest.mark.parametrize("num_pods", [1, 2, 8])
def test_an_endless_crash_ends_the_job_by_its_limit(num_pods):
    """Whichever pods crash, with evictions in between: the limit counts the crashes of all."""
    job = rendered_job(num_pods)
    assert job["spec"]["backoffLimitPerIndex"] >= job["spec"]["backoffLimit"] == 12
    controller = JobController(job)
    for crash in range(12):
        assert controller.end_pods({crash % num_pods: End(1)})
        assert evict(controller, num_pods)
    assert controller.end_pods({0: End(137)}) == {}
    assert controller.reason == "BackoffLimitExceeded"


def test_an_elastic_run_loses_one_pod_at_a_time():
    """Its other pods go on, so only the evicted one is replaced; there are no indexes."""
    controller = JobController(rendered_job(target="elastic"))
    assert [evict(controller, 1) for _ in range(3)] == [10, 20, 40]
