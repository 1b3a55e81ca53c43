"""What the API server demands of a Job beyond its schema.

Source: Kubernetes 1.36, pkg/apis/batch/validation/validation.go.
"""

from collections.abc import Iterator

from samestep.launch.check.names import LONGEST, NAMESPACE, NAMESPACE_RULE
from samestep.launch.render import Document

COUNTS = (
    "parallelism", "completions", "activeDeadlineSeconds", "backoffLimit",
    "ttlSecondsAfterFinished", "backoffLimitPerIndex", "maxFailedIndexes",
)  # fmt: skip
MOST_INDEXES = 100_000  # pods at a time, and failed indexes, of an Indexed Job
MOST_INDEXES_OF_LARGE = 10_000  # the same, with backoffLimitPerIndex and more completions than that
MOST_RULES = 20  # of a podFailurePolicy, and conditions of a rule
MOST_EXIT_CODES = 255
GENERATED_LABELS = (  # of the pods; the server writes them, and refuses other values
    "controller-uid", "job-name",
    "batch.kubernetes.io/controller-uid", "batch.kubernetes.io/job-name",
)  # fmt: skip


def check_job(job: Document) -> Iterator[str]:
    """Yield the mistakes in a Job."""
    if "spec" not in job["spec"]["template"]:
        yield "spec.template.spec: is missing"
        return
    spec = job["spec"]
    yield from check_policies(spec)
    yield from check_counts(spec)
    yield from check_indexes(spec)
    yield from check_failure_policy(spec)
    yield from check_selector(spec)
    yield from check_host_names(job)


def check_policies(spec: Document) -> Iterator[str]:
    """A Job ends, so its pods must not restart always; a podFailurePolicy demands more."""
    restart = spec["template"]["spec"].get("restartPolicy")
    place = f"spec.template.spec.restartPolicy={restart}"
    if restart not in ("Never", "OnFailure"):
        yield f"{place}: must be Never or OnFailure in a Job"
    elif "podFailurePolicy" in spec and restart != "Never":
        yield f"{place}: must be Never beside a podFailurePolicy"
    replacement = spec.get("podReplacementPolicy", "Failed")
    if "podFailurePolicy" in spec and replacement != "Failed":
        yield f"spec.podReplacementPolicy={replacement}: must be Failed beside a podFailurePolicy"


def check_counts(spec: Document) -> Iterator[str]:
    """No number of a Job is negative."""
    for key in COUNTS:
        if spec.get(key, 0) < 0:
            yield f"spec.{key}={spec[key]}: must be at least 0"


def check_indexes(spec: Document) -> Iterator[str]:
    """An Indexed Job has a number of indexes, and limits; another Job has no limits per index."""
    if spec.get("completionMode") == "Indexed":
        yield from check_indexed(spec)
        return
    for key in ("backoffLimitPerIndex", "maxFailedIndexes"):
        if key in spec:
            yield f"spec.{key}={spec[key]}: needs completionMode: Indexed"


def check_indexed(spec: Document) -> Iterator[str]:
    """The numbers of an Indexed Job."""
    completions = spec.get("completions")
    if completions is None:
        yield "spec.completions: is missing; an Indexed Job needs it"
        return
    per_index = "backoffLimitPerIndex" in spec
    if "maxFailedIndexes" in spec and not per_index:
        yield "spec.maxFailedIndexes: needs backoffLimitPerIndex"
    is_large = completions > MOST_INDEXES and per_index
    if is_large and "maxFailedIndexes" not in spec:
        yield f"spec.maxFailedIndexes: is missing; more than {MOST_INDEXES} completions need it"
    most = MOST_INDEXES_OF_LARGE if is_large else MOST_INDEXES
    for key, limit in {"parallelism": most, "maxFailedIndexes": min(most, completions)}.items():
        if spec.get(key, 0) > limit:
            yield f"spec.{key}={spec[key]}: must be at most {limit} in this Job"


def check_failure_policy(spec: Document) -> Iterator[str]:
    """A podFailurePolicy has a limited number of rules."""
    rules = spec.get("podFailurePolicy", {}).get("rules", [])
    place = "spec.podFailurePolicy.rules"
    if len(rules) > MOST_RULES:
        yield f"{place}: has {len(rules)} rules; must have at most {MOST_RULES}"
    for number, rule in enumerate(rules):
        yield from check_failure_rule(spec, f"{place}[{number}]", rule)


def check_failure_rule(spec: Document, place: str, rule: Document) -> Iterator[str]:
    """A rule of the podFailurePolicy is about exit codes or conditions, and not about both."""
    conditions = rule.get("onPodConditions", [])
    if ("onExitCodes" in rule) == bool(conditions):
        yield f"{place}: must have one of onExitCodes and onPodConditions"
    if len(conditions) > MOST_RULES:
        yield f"{place}.onPodConditions: must have at most {MOST_RULES}"
    for condition in conditions:
        status = condition.get("status", "True")
        if status not in ("True", "False", "Unknown"):
            yield f"{place}.onPodConditions: {status} must be True, False or Unknown"
    if rule["action"] == "FailIndex" and "backoffLimitPerIndex" not in spec:
        yield f"{place}.action=FailIndex: needs backoffLimitPerIndex"
    if "onExitCodes" in rule:
        pod = spec["template"]["spec"]
        yield from check_exit_codes(pod, f"{place}.onExitCodes", rule["onExitCodes"])


def check_exit_codes(pod: Document, place: str, rule: Document) -> Iterator[str]:
    """The container exists; the exit codes are in order, and none of them is there twice."""
    names = [container["name"] for container in pod["containers"] + pod.get("initContainers", [])]
    name = rule.get("containerName")
    if name and name not in names:
        fault = f"{place}.containerName={name}: the pod has no such container"
        yield f"{fault}; it has {', '.join(names)}"
    values = rule["values"]
    ordered = sorted(set(values))
    if values != ordered:
        yield (
            f"{place}.values={values}: must be in ascending order without repeats; write {ordered}"
        )
    if not 1 <= len(values) <= MOST_EXIT_CODES:
        yield f"{place}.values: has {len(values)}; must have from 1 to {MOST_EXIT_CODES}"
    if rule["operator"] == "In" and 0 in values:
        yield f"{place}.values={values}: must not have 0, which is no failure"


def check_selector(spec: Document) -> Iterator[str]:
    """The server makes the selector of a Job, and the labels that it selects."""
    if spec.get("manualSelector"):
        return
    if "selector" in spec:
        yield "spec.selector: must be left out; the cluster generates it"
    labels = spec["template"].get("metadata", {}).get("labels", {})
    for key in GENERATED_LABELS:
        if key in labels:
            yield f"spec.template.metadata.labels[{key}]: must be left out; the cluster sets it"


def check_host_names(job: Document) -> Iterator[str]:
    """The host name of a pod of an Indexed Job is the Job's name and the index."""
    spec, name = job["spec"], job["metadata"]["name"]
    if spec.get("completionMode") != "Indexed" or not spec.get("completions"):
        return
    host = f"{name}-{spec['completions'] - 1}"
    if not NAMESPACE.fullmatch(host):
        yield (
            f"metadata.name={name}: its last pod would have the host name {host}, of {len(host)} "
            f"characters, which must be {NAMESPACE_RULE}; choose a RUN_ID that is "
            f"{max(1, len(host) - LONGEST)} shorter"
        )
