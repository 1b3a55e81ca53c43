"""Explain the most frequent errors of kubectl, and why pods wait or fail.

Of every other error the last line of kubectl is shown.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from samestep.launch.render import Manifest
from samestep.ranks.failure import EXIT_SIGTERM

MAKE_CLAIM = (
    "make it by samestep launch --data cluster=k8s cluster.volume_size=SIZE, or name another by "
    "cluster.volume"
)
NO_LOGIN = {  # pattern of an error of kubectl: cause and remedy
    r"context \"?(.*?)\"? does not exist":
        "kubectl has no context {0}: choose one by kubectl config use-context, or set KUBECONFIG",
    r"not found for specified context: (\S+)":
        "kubectl has no context {0}: choose one by kubectl config use-context, or set KUBECONFIG",
    r"must be logged in|Unauthorized|getting credentials":
        "the cluster does not accept your login: log in again; kubectl config current-context says "
        "where",
}  # fmt: skip
NO_CLUSTER = {  # the same, of errors in which no cluster was asked
    r"current-context is not set|no configuration has|localhost:8080":
        "kubectl knows no cluster: choose one by kubectl config use-context, or set KUBECONFIG",
    r"was refused|connection refused|no such host|[Tt]imeout|deadline exceeded|is unreachable|EOF":
        "the cluster does not answer: check that it runs, network and VPN, and kubectl config "
        "current-context",
}  # fmt: skip
CAUSES = {  # pattern of an error or a reason: cause and remedy; {0} is the first group
    r'violates PodSecurity "?(\S+?)"?: (.*)':
        "the namespace rejects the pods by its Pod Security level {0}: {1}; change k8s/pod.yaml, "
        "or choose another cluster.namespace",
    r'exceeded quota: (\S+), requested: (.*?)(?:"|$)':
        "the namespace's quota {0} is used up: {1}; wait for other runs, or ask for less "
        "(trainer.num_nodes, trainer.devices, cluster.memory)",
    r'(?:no matches for kind|have a resource type) "(\w+)':
        "the cluster does not know {0}: have its operator installed, or choose cluster=k8s, which "
        "needs none",
    r'namespaces? "(\S+?)" not found':
        "there is no namespace {0}: have it created, or name another by cluster.namespace",
    r'User "(.*?)" cannot (\w+) resource "(\S+?)"':
        "{0} may not {1} {2} here: ask for the right, or choose another cluster.namespace",
    r"field is immutable":
        "it is in the cluster already, with other values: cancel it first (samestep cancel), or "
        "choose another RUN_ID",
    r"no PriorityClass with name (\S+) was found":
        "there is no PriorityClass {0}: have it created, or name another by cluster.priority_class",
    r"SchedulingGated":
        "it waits for its turn in the queue",
    r"Insufficient (\S+/gpu)":
        "no node has that many free {0}: wait, or ask for fewer by trainer.devices",
    r"Insufficient (cpu|memory|[\w/.-]+)":
        "no node has that much free {0}: wait, or ask for less by cluster.cpus or cluster.memory",
    r"untolerated taint.*Pod's node affinity":  # of some nodes the one, of others the other
        "the free nodes have other labels, or taints: check cluster.node_selector and "
        "cluster.tolerations",
    r"untolerated taint":  # Kubernetes 1.36 does not say which
        "the free nodes have taints: see kubectl describe nodes, and set cluster.tolerations",
    r"Pod's node affinity|node selector":
        "no free node has these labels: check cluster.node_selector",
    r'persistentvolumeclaim "(\S+?)" not found':
        "there is no volume claim {0}: " + MAKE_CLAIM,
    r"(?:ImagePull|ErrImage|InvalidImageName)\w*(.*)":
        "its image cannot be pulled: check cluster.image, that it was pushed, and the namespace's "
        "right to pull it{0}",
    r"OOMKilled":
        "it used more memory than cluster.memory: raise that, or use smaller batches or fewer "
        "loader processes",
    r"^Evicted: (.*?)\.?(?: Threshold|$)":
        "it was evicted ({0}); another pod replaces it",
    r"^(?:DisruptionTarget|Preempt)":
        "it was preempted; another pod replaces it",
}  # fmt: skip

WARNING = re.compile(r"^Warning:.*$", re.MULTILINE)

OVERDUE_S = 60  # seconds after the end of its grace period in which a pod must be gone
IS_LOST = (
    "its node {node} does not answer, so nothing replaces it: if that machine is off for good, "
    "kubectl taint nodes {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute, or "
    "kubectl delete pod {name} --force, then samestep cancel {run}, and launch it again; if it "
    "still runs, two pods would write to the volume"
)
IS_UNREADY = "its node {node} does not answer; after some minutes the cluster evicts its pods"

USUAL_WAITS = ("ContainerCreating", "PodInitializing")
"""Reasons why a container waits that need no explanation: they end by themselves."""


def explain_error(stderr: str) -> str:
    """Explain an error of kubectl in one line; an unknown error by its last line."""
    return explain(stderr, CAUSES | NO_LOGIN | NO_CLUSTER)


def has_no_answer(stderr: str) -> bool:
    """Whether an error of kubectl means that no cluster was asked, or that none answers."""
    return explain_error(stderr) in NO_CLUSTER.values()


def has_no_login(stderr: str) -> bool:
    """Whether an error of kubectl means that the cluster does not know the user."""
    return any(re.search(pattern, stderr) for pattern in NO_LOGIN)


def explain(text: str, causes: Mapping[str, str] = CAUSES) -> str:
    """Explain an event or a reason in one line; an unknown one by its last line."""
    # kubectl prints warnings of the server before its error. They are not the cause.
    lines = WARNING.sub("", text).strip().splitlines()
    message = " ".join(lines)
    for pattern, sentence in causes.items():
        match = re.search(pattern, message)
        if match:
            return sentence.format(*match.groups())
    if not lines:
        return "kubectl failed"
    return lines[-1].removeprefix("error: ").lstrip("* ")


def explain_pod(pod: Manifest, warnings: Sequence[str] = ()) -> str:
    """Explain why a pod does not run, or how it failed; an empty text if it runs or succeeded.

    Args:
        pod: as the cluster describes it.
        warnings: messages of the pod's events, the oldest first.
    """
    status = pod.get("status", {})
    causes = (
        explain_lost(pod),
        explain_eviction(status),
        explain_containers(status),
        explain_conditions(status),
    )
    for cause in causes:
        if cause:
            return cause
    if status.get("phase", "Pending") != "Pending":
        return ""
    return explain_pending(warnings)


def explain_lost(pod: Manifest) -> str:
    """Explain that the node of a pod is lost, which only kubelet could tell; otherwise empty."""
    metadata, status = pod.get("metadata", {}), pod.get("status", {})
    if status.get("phase") != "Running":
        return ""
    words = {
        "name": metadata.get("name"),
        "node": pod.get("spec", {}).get("nodeName"),
        "run": metadata.get("labels", {}).get("samestep/run"),
    }
    if "deletionTimestamp" in metadata:
        # It is the end of the grace period, when kubelet has killed the containers.
        ended = datetime.fromisoformat(metadata["deletionTimestamp"])
        if (datetime.now(UTC) - ended).total_seconds() > OVERDUE_S:
            return IS_LOST.format(**words)
        return ""
    # Kubelet sets both. If only the pod is not ready, the controller of nodes says so.
    conditions = [(found["type"], found["status"]) for found in status.get("conditions", ())]
    containers = [container.get("ready") for container in status.get("containerStatuses", ())]
    if ("Ready", "False") in conditions and containers and all(containers):
        return IS_UNREADY.format(**words)
    return ""


def explain_eviction(status: Manifest) -> str:
    """Explain why kubelet has evicted a pod; otherwise empty. Its containers say only 137."""
    if status.get("reason") == "Evicted":
        return explain_reason(status)
    return ""


def explain_containers(status: Manifest) -> str:
    """Explain why a container of a pod failed, or cannot start."""
    for container in status.get("containerStatuses", ()):
        exit_cause = explain_exit(container)
        if exit_cause:
            return exit_cause
        waiting = container.get("state", {}).get("waiting", {})
        reason = waiting.get("reason", "ContainerCreating")
        if reason not in USUAL_WAITS:
            return explain(f"{reason}: {waiting.get('message', '')}")
    return ""


def explain_conditions(status: Manifest) -> str:
    """Explain why a pod got no node, or was evicted from its node."""
    for condition in status.get("conditions", ()):
        if (condition["type"], condition["status"]) == ("PodScheduled", "False"):
            return explain_reason(condition)
    if "reason" in status:
        return explain_reason(status)
    return ""


def explain_reason(node: Manifest) -> str:
    """Explain a condition, or another part of an object with a reason and a message."""
    return explain(f"{node.get('reason', '')}: {node.get('message', '')}")


def explain_pending(warnings: Sequence[str]) -> str:
    """Explain by its events why a pod that has a node does not start."""
    # The state of a pod does not say why a volume cannot be mounted: only its events do.
    newest = cause = ""
    for newest in warnings:
        # This event only reports the delay. Another one has the reason, if there is any.
        if not newest.startswith("Unable to attach or mount"):
            cause = newest
    found = " ".join((cause or newest).split())
    if not found:
        return "is being placed, or pulls its image"
    return explain(found)


def explain_exit(container: Manifest) -> str:
    """Explain how a container failed the last time; an empty text if it did not fail.

    A container that succeeded after a restart has not failed.
    """
    # Between two attempts the state is "waiting", and how the last one ended is in lastState.
    ended = find_ended(container, "state") or find_ended(container, "lastState")
    exit_code = ended.get("exitCode")
    if not exit_code:
        return ""
    title = f"exit code {exit_code}: "
    cause = find_cause(ended, title)
    return f"{title}{' '.join(cause.split())}".removesuffix(": ")


def find_ended(container: Manifest, key: str) -> Manifest:
    """Return how the container ended, as one of its states says; empty if it did not end."""
    ended: Manifest = container.get(key, {}).get("terminated", {})
    return ended


def find_cause(ended: Manifest, title: str) -> str:
    """Return why a container ended: in the words of our entry point, or the end of its log."""
    if ended.get("reason") == "OOMKilled" and ended["exitCode"] != EXIT_SIGTERM:
        return explain("OOMKilled")
    message = str(ended.get("message", "")).strip()
    # Our entry point begins its termination message like this.
    if message.startswith(title):
        return message.removeprefix(title)
    if ended["exitCode"] == EXIT_SIGTERM:
        return "saved and stopped"
    # Otherwise the message is the end of the log, and its last line names the error.
    return message.rpartition("\n")[2]
