"""Rules for Jobs that the API server checks in code, so that no schema has them."""

from collections.abc import Iterator

from samestep.launch.check.documents import Node, walk_mappings


def check_jobs(document: Node) -> Iterator[str]:
    """Yield the mistakes in every Job in ``document``, also in those that a controller makes."""
    for path, node in walk_mappings(document):
        # A Deployment has a pod template too, but neither of the two fields.
        if "template" in node and ("backoffLimit" in node or "podFailurePolicy" in node):
            for check in CHECKS:
                yield from check(node, path)


def check_restart_policy(job: Node, path: str) -> Iterator[str]:
    """A Job ends, so its pods must not restart always; with a podFailurePolicy never."""
    policy = job["template"]["spec"].get("restartPolicy")
    place = f"{path}.template.spec.restartPolicy={policy}"
    if policy not in ("Never", "OnFailure"):
        yield f"{place}: must be Never or OnFailure in a Job"
    elif "podFailurePolicy" in job and policy != "Never":
        yield f"{place}: must be Never beside a podFailurePolicy"


def check_policy_containers(job: Node, path: str) -> Iterator[str]:
    """A podFailurePolicy may only name containers that the pod has."""
    pod = job["template"]["spec"]
    names = [container["name"] for container in pod["containers"] + pod.get("initContainers", [])]
    for number, rule in find_exit_code_rules(job):
        name = rule.get("containerName")
        if name and name not in names:
            place = f"{path}.podFailurePolicy.rules[{number}].onExitCodes.containerName"
            yield f"{place}={name}: the pod has no such container; it has {', '.join(names)}"


def check_exit_codes(job: Node, path: str) -> Iterator[str]:
    """The API server refuses exit codes that are not in order, or that stand there twice."""
    for number, rule in find_exit_code_rules(job):
        values = rule["values"]
        ordered = sorted(set(values))
        if values != ordered:
            place = f"{path}.podFailurePolicy.rules[{number}].onExitCodes.values"
            yield f"{place}={values}: must be in ascending order without repeats; write {ordered}"


def find_exit_code_rules(job: Node) -> Iterator[tuple[int, Node]]:
    """Yield the number and ``onExitCodes`` of each rule of the podFailurePolicy that has some."""
    for number, rule in enumerate(job.get("podFailurePolicy", {}).get("rules", ())):
        if "onExitCodes" in rule:
            yield number, rule["onExitCodes"]


CHECKS = (check_restart_policy, check_policy_containers, check_exit_codes)
