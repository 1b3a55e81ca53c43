"""A model of Kubernetes' Job controller: how long it waits before it replaces pods that failed.

It has no clock. A test tells it which pods fail together. It answers how many seconds each of them
waits for its replacement, and whether the Job has failed.

Source: Kubernetes 1.36, pkg/controller/job: ``backoff_utils.go`` (the waiting times),
``indexed_job_utils.go`` (limits per index), ``pod_failure_policy.go`` and ``job_controller.go``.
The real controller may miss some failures while it waits, so it waits at most as long.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

FIRST_WAIT_S = 10  # DefaultJobPodFailureBackOff
LONGEST_WAIT_S = 600  # MaxJobPodFailureBackOff


class End(NamedTuple):
    """How a pod failed."""

    exit_code: int
    is_disrupted: bool = False  # evicted, preempted or drained


class JobController:
    """The state that the controller keeps for one Job.

    Args:
        job: as rendered.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.spec = job["spec"]
        self.failures = 0  # of all pods; ignored ones count here too
        self.counted = 0  # those that the podFailurePolicy does not ignore
        self.failures_of_index: Counter[int] = Counter()
        self.counted_of_index: Counter[int] = Counter()
        self.reason = ""  # why the Job has failed; empty while it has not

    def end_pods(self, ends: Mapping[int, End]) -> dict[int, int]:
        """Let pods fail together, by their index.

        Returns:
            Seconds until each is replaced; none if the Job has failed.
        """
        for index, end in ends.items():
            self.count(index, self.match_policy(end))
        if self.reason:
            return {}
        if "backoffLimitPerIndex" not in self.spec:
            return dict.fromkeys(ends, wait_s(self.failures))
        return {index: wait_s(self.failures_of_index[index]) for index in ends}

    def match_policy(self, end: End) -> str:
        """The action of the first rule that matches; Count if none does."""
        for rule in self.spec["podFailurePolicy"]["rules"]:
            by_code = end.exit_code in rule.get("onExitCodes", {}).get("values", ())
            conditions = [condition["type"] for condition in rule.get("onPodConditions", ())]
            if by_code or (end.is_disrupted and "DisruptionTarget" in conditions):
                return str(rule["action"])
        return "Count"

    def count(self, index: int, action: str) -> None:
        """Count a failure, and fail the Job if that is one too many."""
        self.failures += 1
        self.failures_of_index[index] += 1
        if action == "Ignore":
            return
        self.counted += 1
        self.counted_of_index[index] += 1
        if action == "FailJob":
            self.reason = "PodFailurePolicy"
        elif self.counted > self.spec["backoffLimit"]:
            self.reason = self.reason or "BackoffLimitExceeded"


def wait_s(failures: int) -> int:
    """Seconds after so many failures: doubled with each one, up to the longest."""
    return min(FIRST_WAIT_S * 2 ** (failures - 1), LONGEST_WAIT_S)
