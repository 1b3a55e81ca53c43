"""Explain errors of kubectl and states of pods: one sentence with the cause and the remedy."""

import re
from collections.abc import Iterator, Sequence

from samestep.launch.render import Document
from samestep.ranks.failure import EXIT_SIGTERM

MAKE_CLAIM = (
    "make it by samestep launch cluster=k8s cluster.volume_size=SIZE --data, or name another"
)

ERRORS = {  # pattern of an error: cause and remedy; {0} is the first group of the pattern
    r'violates PodSecurity "?(\S+?)"?: (.*)':
        "the namespace refuses the pods by its Pod Security level {0}: {1}; look at "
        "k8s/pod.yaml, or choose another cluster.namespace",
    r'exceeded quota: (\S+), requested: (.*?)(?:"|$)':
        "the namespace's quota {0} is used up: {1}; wait for other runs, ask for less "
        "(trainer.num_nodes, trainer.devices, cluster.memory), or ask its owner for more",
    r"must be created before":
        "an object that this one refers to is not in the cluster yet",
    r'no matches for kind "(\w+)" in version "(\S+?)"':
        "the cluster does not know {0} ({1}): have its operator installed, or choose cluster=k8s,"
        " which needs none",
    r'have a resource type "(\S+?)"':
        "the cluster does not know {0}: have its operator installed, or choose cluster=k8s, which"
        " needs none",
    r'namespaces? "(\S+?)" not found':
        "there is no namespace {0}: have it created, or name another by cluster.namespace",
    r"field is immutable":
        "it is in the cluster already, with other values: cancel it first (samestep cancel), or "
        "choose another RUN_ID",
    r'unknown field "(.*?)"':
        "the cluster does not know the field {0}: it is older than the manifests; they need "
        "Kubernetes 1.29 or later, and the operators that docs/clusters names",
    r"(?:Unauthorized|provide credentials)":
        "the cluster does not know you: log in again (kubectl auth whoami), or check the user "
        "of kubectl's context",
    r'User "(.*?)" cannot (\w+) resource "(\S+?)"':
        "{0} may not {1} {2} here: ask for the right, or choose another cluster.namespace",
    r"[Ff]orbidden: (.*)":
        "the cluster forbids it: {0}",
    r"context .* does not exist|current-context is not set|no configuration has|localhost:8080":
        "kubectl knows no cluster: choose one by kubectl config use-context, or set KUBECONFIG",
    r"connection refused|connection to the server (\S+) was refused":
        "the cluster does not answer: check that it runs, and kubectl config current-context",
    r"no such host|i/o timeout|deadline exceeded|Timeout|TLS handshake|network is unreachable|EOF":
        "the cluster cannot be reached: check network and VPN, and kubectl config "
        "current-context",
    r"certificate|x509":
        "the cluster's certificate is not the expected one: renew kubectl's context",
    r"(admission webhook .*? denied the request: .*)":
        "{0}",
}  # fmt: skip
POD_REASONS = {  # pattern of why a pod waits or was ended: cause and remedy
    r"SchedulingGated":
        "it waits for its turn in the queue",
    r"Insufficient (\S+/gpu)":
        "no node has that many free {0}: wait, or ask for fewer by trainer.devices",
    r"Insufficient (cpu|memory|\S+)":
        "no node has that much free {0}: wait, or ask for less by cluster.cpus or "
        "cluster.memory",
    r'persistentvolumeclaim "(\S+?)" not found':
        "there is no volume claim {0}: " + MAKE_CLAIM + " by cluster.volume",
    r'volume "(\S+?)" ?:? ?(.+)':
        "its volume {0} cannot be mounted: {1}; check cluster.volume, and what it is made of",
    r"unmounted volumes=\[(.*?)\].*: (.+)":
        "its volume {0} cannot be mounted: {1}; check cluster.volume, and what it is made of",
    r"PersistentVolumeClaim|[Vv]olume|FailedMount":
        "its volume is not ready: kubectl describe pvc",
    r"untolerated taint \{(\S+?)[:}]":
        "the free nodes have the taint {0}: set cluster.tolerations",
    r"node affinity|node selector":
        "no free node has these labels: check cluster.node_selector",
    r"ImagePull|ErrImage|InvalidImageName|ErrImageNeverPull":
        "its image {image} cannot be pulled: check cluster.image, that it was pushed, and the "
        "namespace's right to pull it",
    r"CrashLoopBackOff|BackOff":
        "it fails again and again: samestep logs says why",
    r"CreateContainerConfigError|CreateContainerError|RunContainerError":
        "its container cannot be created: check cluster.secret, cluster.user and the volume",
    r"OOMKilled":
        "it used more memory than cluster.memory: raise that, or use smaller batches or fewer "
        "loader processes",
    r"Evicted|DisruptionTarget|Preempt":
        "its node was taken away; another pod replaces it",
}  # fmt: skip


def explain_error(stderr: str) -> str:
    """Explain an error of kubectl; an unknown one by its last line."""
    lines = [line for line in stderr.strip().splitlines() if not line.startswith(("Warning:", "{"))]
    if sentence := _find_sentence(ERRORS, "\n".join(lines)):
        return sentence
    return lines[-1].removeprefix("error: ") if lines else "kubectl failed"


def explain_event(message: str) -> str:
    """Explain the message of an event; an unknown one is returned as one line."""
    line = _join_lines(message)
    return _find_sentence(ERRORS, line) or line


def explain_waiting(pod: Document, warnings: Sequence[str] = ()) -> str:
    """Explain why a pod does not run; nothing if it runs or has ended.

    ``warnings`` are messages of its events, the oldest first: the state of a pod does not say that
    a volume cannot be mounted.
    """
    status = pod.get("status", {})
    for container in _list_statuses(status):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            reason = f"{waiting['reason']} {waiting.get('message', '')}"
            return explain_reason(reason, container.get("image", ""))
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return explain_reason(f"{condition.get('reason', '')} {condition.get('message', '')}")
    if status.get("phase") not in (None, "Pending"):
        return ""
    # This one only says that a volume is late, and comes beside the one that says why.
    causes = [text for text in warnings if not text.startswith("Unable to attach or mount")]
    if found := causes or warnings:
        return explain_reason(found[-1])
    return "is being placed, or pulls its image"


def explain_exit(pod: Document) -> str:
    """Explain how a pod's container failed the last time; nothing if it did not fail.

    A container that has succeeded since, after a restart, has not failed.
    """
    for container in _list_statuses(pod.get("status", {})):
        states = [container.get(key, {}).get("terminated") for key in ("state", "lastState")]
        terminated: Document = next(filter(None, states), {})
        if terminated.get("exitCode"):
            return _describe_exit(terminated)
    return ""


def explain_reason(reason: str, image: str = "") -> str:
    """Explain why a pod waits or was ended; an unknown reason is returned as one line."""
    line = _join_lines(reason)
    return _find_sentence(POD_REASONS, line, image) or line


def _describe_exit(terminated: Document) -> str:
    exit_code = terminated["exitCode"]
    # Our entry point begins its message like this; otherwise it is the end of the log.
    prefix = f"exit code {exit_code}: "
    message = str(terminated.get("message") or "").strip()
    is_ours = message.startswith(prefix)
    if exit_code == EXIT_SIGTERM:
        return f"{message.removeprefix(prefix) if is_ours else 'saved and stopped'} ({exit_code})"
    cause = _join_lines(message.removeprefix(prefix)) if is_ours else _find_cause(message)
    reason = terminated.get("reason", "Error")
    hint = f" ({explain_reason(reason)})" if reason == "OOMKilled" else ""
    return ": ".join(filter(None, [f"{reason}, exit code {exit_code}{hint}", cause]))


def _find_cause(log: str) -> str:
    """Return the last error in a log with all its lines, or the last line of the log."""
    lines = log.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    return _join_lines("\n".join(lines[starts[-1] if starts else -1 :]))


def _join_lines(text: str) -> str:
    return " ".join(text.split())


def _find_sentence(sentences: dict[str, str], text: str, image: str = "") -> str:
    for pattern, sentence in sentences.items():
        if match := re.search(pattern, text):
            return sentence.format(*(group or "" for group in match.groups()), image=image)
    return ""


def _list_statuses(status: Document) -> Iterator[Document]:
    yield from status.get("initContainerStatuses", ())
    yield from status.get("containerStatuses", ())
