"""Create a TrainJob with Kubeflow's own SDK, as its users do in notebooks."""

import json
import logging
import re
from collections.abc import Sequence
from http import HTTPStatus
from importlib.util import find_spec

from omegaconf import DictConfig

from samestep.errors import RunError
from samestep.launch import kubectl
from samestep.launch.explain import explain_error
from samestep.launch.render import Manifest

SUBMITTED_ANNOTATION = "kubectl.kubernetes.io/last-applied-configuration"
"""Where kubectl notes what was submitted; the next submit compares itself with it."""


def is_installed() -> bool:
    """Whether the SDK is installed; it is the extra ``kubeflow`` in pyproject.toml."""
    return find_spec("kubeflow") is not None


def create(cfg: DictConfig, manifests: Sequence[Manifest]) -> str:
    """Create the TrainJob, the last manifest, by ``TrainerClient().train``; the others by kubectl.

    Returns what was done, one line for each object.
    """
    from kubeflow.common.types import KubernetesBackendConfig
    from kubeflow.trainer import CustomTrainerContainer, TrainerClient
    from kubeflow.trainer.options import Annotations, Labels, Name, TrainerArgs
    from kubernetes.client import ApiException
    from kubernetes.config import ConfigException

    *needed, job = manifests
    metadata, trainer = job["metadata"], job["spec"]["trainer"]
    lines = kubectl.apply(cfg, needed)
    result = "created by Kubeflow's SDK"
    logging.getLogger("kubeflow").setLevel(logging.ERROR)  # warns if it may not read its version
    try:
        TrainerClient(KubernetesBackendConfig(namespace=cfg.cluster.namespace)).train(
            runtime=job["spec"]["runtimeRef"]["name"],
            # The SDK has no numProcPerNode; --nproc-per-node is among the arguments.
            trainer=CustomTrainerContainer(image=trainer["image"], num_nodes=trainer["numNodes"]),
            options=[
                Name(metadata["name"]),
                Labels(metadata["labels"]),
                Annotations({SUBMITTED_ANNOTATION: json.dumps(job)}),
                TrainerArgs(trainer["args"]),
            ],
        )
    except (RuntimeError, TimeoutError, ConfigException) as error:
        cause = error.__cause__
        if not isinstance(cause, ApiException):
            raise RunError(explain_error(str(cause or error))) from None
        if cause.status != HTTPStatus.CONFLICT:
            answer = re.search(r'"message": ?("(?:[^"\\]|\\.)*")', cause.body or "")
            text = json.loads(answer[1]) if answer else str(cause.reason)
            raise RunError(explain_error(text)) from None
        result = "unchanged"
    return f"{lines}trainjob.trainer.kubeflow.org/{metadata['name']} {result}\n"
