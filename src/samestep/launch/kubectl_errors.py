"""Explain errors of kubectl and states of pods: one sentence with the cause and the remedy."""

import re
from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]
"""An object in the cluster, such as a pod, or the document that describes one."""

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
        "it is in the cluster already, with other values: cancel it first (action=cancel), or "
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
        "there is no volume claim {0}: create it as docs/clusters/k8s.md says, or set "
        "cluster.volume",
    r"PersistentVolumeClaim|[Vv]olume|FailedMount":
        "its volume is not ready: kubectl describe pvc",
    r"untolerated taint \{(\S+?)[:}]":
        "the free nodes have the taint {0}: set cluster.tolerations",
    r"node affinity|node selector":
        "no free node has these labels: check cluster.node_selector",
    r"ImagePull|ErrImage|InvalidImageName|ErrImageNeverPull":
        "its image cannot be pulled: check the name cluster.image, that it was pushed, and the "
        "namespace's right to pull it",
    r"CrashLoopBackOff|BackOff":
        "it fails again and again: action=logs says why",
    r"CreateContainerConfigError|CreateContainerError|RunContainerError":
        "its container cannot be created: check cluster.secret, cluster.user and the volume",
    r"OOMKilled":
        "it used more memory than cluster.memory: raise that, or use smaller batches or fewer "
        "loader processes",
    r"Evicted|DisruptionTarget|Preempt":
        "its node was taken away; another pod replaces it",
}  # fmt: skip


def explain_error(stderr: str) -> str:
    """Explain an error of kubectl or the message of an event; unknown ones by their last line."""
    lines = [line for line in stderr.strip().splitlines() if not line.startswith(("Warning:", "{"))]
    if sentence := _find_sentence(ERRORS, "\n".join(lines)):
        return sentence
    return lines[-1].removeprefix("error: ") if lines else "kubectl failed"


def explain_waiting(pod: Object) -> str:
    """Explain why a pod does not run; nothing if it runs or has ended."""
    status = pod.get("status", {})
    for container in _list_statuses(status):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return explain_reason(f"{waiting['reason']} {waiting.get('message', '')}")
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return explain_reason(f"{condition.get('reason', '')} {condition.get('message', '')}")
    if status.get("phase") in (None, "Pending"):
        return "is being placed, or pulls its image"
    return ""


def explain_exit(pod: Object) -> str:
    """Explain how a pod's container failed the last time; nothing if it did not fail."""
    for container in _list_statuses(pod.get("status", {})):
        for state in (container.get("state", {}), container.get("lastState", {})):
            terminated = state.get("terminated")
            if terminated and terminated.get("exitCode"):
                return _describe_exit(terminated)
    return ""


def explain_reason(reason: str) -> str:
    """Explain why a pod waits or was ended; an unknown reason is returned as it is."""
    return _find_sentence(POD_REASONS, reason) or reason.strip()


def _describe_exit(terminated: Object) -> str:
    reason = terminated.get("reason", "Error")
    hint = f" ({explain_reason(reason)})" if reason == "OOMKilled" else ""
    last_line = (terminated.get("message") or "").strip().splitlines()[-1:]
    return ": ".join([f"{reason}, exit code {terminated['exitCode']}{hint}", *last_line])


def _find_sentence(sentences: dict[str, str], text: str) -> str:
    for pattern, sentence in sentences.items():
        if match := re.search(pattern, text):
            return sentence.format(*(group or "" for group in match.groups()))
    return ""


def _list_statuses(status: Object) -> Iterator[Object]:
    yield from status.get("initContainerStatuses", ())
    yield from status.get("containerStatuses", ())
