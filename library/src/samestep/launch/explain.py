"""Explain what people meet most: errors of kubectl, and why pods wait or fail.

Every other error is kubectl's own last line.
"""

import re
from collections.abc import Mapping, Sequence

from samestep.launch.render import Manifest
from samestep.ranks.failure import EXIT_SIGTERM

MAKE_CLAIM = (
    "make it by samestep launch --data cluster=k8s cluster.volume_size=SIZE, or name another by "
    "cluster.volume"
)
NO_CLUSTER = {  # pattern of an error of kubectl: cause and remedy
    r"context .* does not exist|current-context is not set|no configuration has|localhost:8080":
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
    r'no matches for kind "(\w+)"|have a resource type "(\w+)':
        "the cluster does not know {0}: have its operator installed, or choose cluster=k8s, which "
        "needs none",
    r'namespaces? "(\S+?)" not found':
        "there is no namespace {0}: have it created, or name another by cluster.namespace",
    r'User "(.*?)" cannot (\w+) resource "(\S+?)"':
        "{0} may not {1} {2} here: ask for the right, or choose another cluster.namespace",
    r"field is immutable":
        "it is in the cluster already, with other values: cancel it first (samestep cancel), or "
        "choose another RUN_ID",
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
    r"^(?:Evicted|DisruptionTarget|Preempt)":
        "it was evicted or preempted; another pod replaces it",
}  # fmt: skip


def explain_error(stderr: str) -> str:
    """Explain an error of kubectl in one line; others by their last line."""
    return explain(stderr, CAUSES | NO_CLUSTER)


def explain(text: str, causes: Mapping[str, str] = CAUSES) -> str:
    """Explain an event or a reason in one line; others by their last line."""
    lines = [line for line in text.strip().splitlines() if not line.startswith("Warning:")]
    for pattern, sentence in causes.items():
        if match := re.search(pattern, " ".join(lines)):
            return sentence.format(*(group for group in match.groups() if group is not None))
    return lines[-1].removeprefix("error: ").lstrip("* ") if lines else "kubectl failed"


def explain_pod(pod: Manifest, warnings: Sequence[str] = ()) -> str:
    """Explain why a pod does not run, or how it failed; nothing if all is well.

    ``warnings`` are messages of its events, the oldest first: the state of a pod does not say why a
    volume cannot be mounted.
    """
    status = pod.get("status", {})
    for container in status.get("containerStatuses", ()):
        if ended := explain_exit(container):
            return ended
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return explain(f"{waiting['reason']}: {waiting.get('message', '')}")
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return explain(f"{condition.get('reason', '')}: {condition.get('message', '')}")
    if "reason" in status:
        return explain(f"{status['reason']}: {status.get('message', '')}")
    if status.get("phase") not in (None, "Pending"):
        return ""
    # This one only says that a volume is late, and comes beside the one that says why.
    causes = [text for text in warnings if not text.startswith("Unable to attach or mount")]
    found = " ".join(["", *warnings, *causes][-1].split())
    return explain(found) if found else "is being placed, or pulls its image"


def explain_exit(container: Manifest) -> str:
    """Explain how a container failed the last time; nothing if it did not fail.

    A container that has succeeded since, after a restart, has not failed.
    """
    states = [container.get(key, {}).get("terminated") for key in ("state", "lastState")]
    ended: Manifest = next(filter(None, states), {})
    exit_code = ended.get("exitCode")
    if not exit_code:
        return ""
    # Our entry point begins its message like this; otherwise it is the end of the log.
    title, message = f"exit code {exit_code}: ", str(ended.get("message") or "").strip()
    is_ours = message.startswith(title)
    cause = message.removeprefix(title) if is_ours else message.rpartition("\n")[2]
    if exit_code == EXIT_SIGTERM:
        cause = cause if is_ours else "saved and stopped"
    elif ended.get("reason") == "OOMKilled":
        cause = explain("OOMKilled")
    return f"exit code {exit_code}: {' '.join(cause.split())}".removesuffix(": ")
