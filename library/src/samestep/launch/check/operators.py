"""What the webhooks of the operators demand of their objects beyond the schemas.

Sources: JobSet 0.12 (pkg/webhooks/jobset_webhook.go), Kubeflow Trainer 2.3 (pkg/webhooks, the
Validate of pkg/runtime/framework/plugins, and the CEL rules of pkg/apis), training operator 1.9
(pkg/webhooks/pytorch).
"""

import re
from collections.abc import Iterator

from samestep.launch.check.documents import walk_mappings
from samestep.launch.check.names import DOMAIN, NAME, NAME_RULE
from samestep.launch.check.pods import find_repeated
from samestep.launch.render import Document

MOST_PODS = 2**31 - 1
RULE_NAME = re.compile(r"(?=.{1,128}$)[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
RULE_NAME_RULE = "at most 128 of A-Z a-z 0-9 _ , :, the first a letter, the last not , or :"
JOB_FAILURE_REASONS = (
    "BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
)  # fmt: skip
ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
CONTAINERS_OF_STEP = {
    "trainer": "node",
    "dataset-initializer": "dataset-initializer",
    "model-initializer": "model-initializer",
}
RESERVED_VARIABLES = (  # Trainer sets them
    "PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT",
)  # fmt: skip


def check_jobset(jobset: Document) -> Iterator[str]:
    """Yield the mistakes in a JobSet."""
    name, spec = jobset["metadata"]["name"], jobset["spec"]
    subdomain = spec.get("network", {}).get("subdomain")
    if subdomain and not (DOMAIN.fullmatch(subdomain) and NAME.fullmatch(subdomain)):
        yield f"spec.network.subdomain={subdomain}: must be {NAME_RULE}"
    jobs = spec.get("replicatedJobs", [])
    for number, job in enumerate(jobs):
        place = f"spec.replicatedJobs[{number}]"
        yield from (f"{place}{fault}" for fault in check_names_of_pods(name, job))
        if number == 0 and "dependsOn" in job:
            yield f"{place}.dependsOn: must be left out of the first one"
        pods = job.get("replicas", 1) * job["template"]["spec"].get("parallelism", 1)
        if pods > MOST_PODS:
            yield f"{place}: replicas x parallelism={pods} must be at most {MOST_PODS}"
    names = [job["name"] for job in jobs]
    for target in spec.get("successPolicy", {}).get("targetReplicatedJobs", ()):
        if target not in names:
            yield f"spec.successPolicy: there is no replicatedJob {target}"
    yield from check_failure_rules(spec, names)


def check_names_of_pods(jobset: str, job: Document) -> Iterator[str]:
    """The longest names of Jobs and pods that are made of the JobSet's name fit."""
    spec = job["template"]["spec"]
    longest = f"{jobset}-{job['name']}-{max(0, job.get('replicas', 1) - 1)}"
    if spec.get("completionMode", "Indexed") == "Indexed" and "completions" in spec:
        longest += f"-{max(0, spec['completions'] - 1)}-abcde"
    if not NAME.fullmatch(longest):
        yield (
            f".name={job['name']}: a pod would have the name {longest}, of {len(longest)} "
            f"characters; it must have {NAME_RULE}; choose a shorter RUN_ID"
        )


def check_failure_rules(spec: Document, names: list[str]) -> Iterator[str]:
    """The rules of the failurePolicy have names of their own, and know Jobs and reasons."""
    rules = spec.get("failurePolicy", {}).get("rules", [])
    for number, rule in enumerate(rules):
        place = f"spec.failurePolicy.rules[{number}]"
        name = rule.get("name", f"failurePolicyRule{number}")
        if not RULE_NAME.fullmatch(name):
            yield f"{place}.name={name}: must be {RULE_NAME_RULE}"
        for target in rule.get("targetReplicatedJobs", ()):
            if target not in names:
                yield f"{place}: there is no replicatedJob {target}; there is {', '.join(names)}"
        for reason in rule.get("onJobFailureReasons", ()):
            if reason not in JOB_FAILURE_REASONS:
                known = ", ".join(JOB_FAILURE_REASONS)
                yield f"{place}: {reason} is no reason of a Job; reasons are {known}"
    repeated = find_repeated([rule["name"] for rule in rules if "name" in rule])
    yield from (f"spec.failurePolicy.rules: two have the name {name}" for name in repeated)


def check_training_runtime(runtime: Document) -> Iterator[str]:
    """Yield the mistakes in a TrainingRuntime: its steps have one replica and their container."""
    for number, job in enumerate(runtime["spec"]["template"]["spec"].get("replicatedJobs", ())):
        place = f"spec.template.spec.replicatedJobs[{number}]"
        step = job["template"].get("metadata", {}).get("labels", {}).get(ANCESTOR)
        if step not in CONTAINERS_OF_STEP:
            continue
        if job.get("replicas", 1) != 1:
            yield f"{place}.replicas={job['replicas']}: must be 1"
        pod = job["template"]["spec"]["template"]["spec"]
        names = [container["name"] for container in pod["containers"]]
        if CONTAINERS_OF_STEP[step] not in names:
            yield (
                f"{place}: the step {step} needs a container with the name "
                f"{CONTAINERS_OF_STEP[step]}; it has {', '.join(names)}"
            )


def check_train_job(job: Document) -> Iterator[str]:
    """Yield the mistakes in a TrainJob."""
    name, trainer = job["metadata"]["name"], job["spec"].get("trainer", {})
    if not NAME.fullmatch(name):
        yield f"metadata.name={name}: a TrainJob must have {NAME_RULE}"
    processes = trainer.get("numProcPerNode", 1)
    if isinstance(processes, int) and processes < 1:
        yield f"spec.trainer.numProcPerNode={processes}: must be at least 1"
    for variable in trainer.get("env", ()):
        if variable["name"] in RESERVED_VARIABLES:
            yield f"spec.trainer.env: {variable['name']} must be left out; Trainer sets it"
    for path, patch in walk_mappings({"runtimePatches": job["spec"].get("runtimePatches", [])}):
        # Only the objects that patch a container have both keys.
        if patch.get("env") and patch.get("name") in CONTAINERS_OF_STEP.values():
            yield f"spec.{path}: must not have env for the container {patch['name']}"


def check_pytorch_job(job: Document) -> Iterator[str]:
    """Yield the mistakes in a PyTorchJob."""
    name, roles = job["metadata"]["name"], job["spec"].get("pytorchReplicaSpecs", {})
    if not NAME.fullmatch(name):
        yield f"metadata.name={name}: a PyTorchJob must have {NAME_RULE}"
    for role, spec in roles.items():
        place = f"spec.pytorchReplicaSpecs.{role}"
        if role not in ("Master", "Worker"):
            yield f"{place}: must be Master or Worker"
        replicas = spec.get("replicas", 1)
        if replicas < 1 or (role == "Master" and replicas != 1):
            yield f"{place}.replicas={replicas}: must be at least 1, and 1 for a Master"
        names = [item["name"] for item in spec["template"]["spec"]["containers"]]
        if "pytorch" not in names:
            yield f"{place}: needs a container with the name pytorch; it has {', '.join(names)}"
