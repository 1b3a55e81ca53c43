"""kubectl: what is in the cluster of a run."""

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig

from samestep.errors import RunError
from samestep.launch import check, render
from samestep.launch import kubectl_errors as reasons

Node = dict[str, Any]

RUNS = ("Job", "JobSet", "PyTorchJob", "TrainJob", "ElasticJob")
ENDS = {"Complete": True, "Completed": True, "Succeeded": True, "Failed": False}  # conditions


def words(cfg: DictConfig, *rest: str) -> list[str]:
    """A command of kubectl, in the namespace of the configuration if it has one."""
    namespace = ["-n", cfg.cluster.namespace] if cfg.cluster.namespace else []
    return ["kubectl", *namespace, *rest]


def call(cfg: DictConfig, *rest: str, documents: Sequence[Node] = (), timeout_s: float = 30) -> str:
    """What kubectl answers.

    Raises:
        RunError: in one sentence, what was wrong and what to do.
    """
    command = words(cfg, *rest, f"--request-timeout={timeout_s:g}s")
    text = render.text(documents) if documents else ""
    try:
        result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RunError(
            "kubectl: no such command on this machine; install it from "
            "https://kubernetes.io/docs/tasks/tools"
        ) from None
    if result.returncode:
        raise RunError(reasons.explained(result.stderr))
    return result.stdout


def apply(cfg: DictConfig, documents: Sequence[Node]) -> str:
    """Create or change what the documents say; what kubectl says."""
    return call(cfg, "apply", "--validate=strict", "--filename=-", documents=documents)


def get(cfg: DictConfig, *rest: str) -> Any:
    """What kubectl gets, None if it is not there."""
    answer = call(cfg, "get", *rest, "--output=json", "--ignore-not-found")
    return json.loads(answer) if answer.strip() else None


def run_of(documents: Sequence[Node]) -> Node:
    """The document that ends when the run ends."""
    return next(document for document in documents if document["kind"] in RUNS)


def address(document: Node) -> str:
    """What kubectl calls the document's object, such as ``jobs.batch/mine``."""
    kind = f"{document['apiVersion']} {document['kind']}"
    group = document["apiVersion"].rpartition("/")[0]
    plural = check.schemas()["kinds"][kind]["plural"]
    return f"{plural}{'.' * bool(group)}{group}/{document['metadata']['name']}"


def pods_of(cfg: DictConfig) -> list[Node]:
    """The pods of the run."""
    found = get(cfg, "pods", f"--selector=app.kubernetes.io/instance={cfg.run_id}")
    return sorted((found or {}).get("items", []), key=lambda pod: pod["metadata"]["name"])


def is_training(cfg: DictConfig, pod: Node) -> bool:
    """Whether a pod is a node of the run, not what the nodes need, such as etcd."""
    return cfg.cluster.container in [c["name"] for c in pod["spec"]["containers"]]


def end_of(there: Node | None) -> bool | None:
    """Whether the run ended well; None while it runs, or is not there."""
    for condition in (there or {}).get("status", {}).get("conditions", ()):
        if condition["type"] in ENDS and condition["status"] == "True":
            return ENDS[condition["type"]]
    return None


def gone(cfg: DictConfig) -> RunError:
    """There is nothing of this name."""
    where = f" in namespace {cfg.cluster.namespace}" if cfg.cluster.namespace else ""
    return RunError(
        f"{cfg.run_id}: there is no such run{where}; it was not submitted, was cancelled, or ended "
        "longer ago than its cluster.ttl_s; RUN_ID=... names another"
    )
