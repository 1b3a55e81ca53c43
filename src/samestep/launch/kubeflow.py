"""A TrainJob created by Kubeflow's own SDK, as its users do it in notebooks."""

import json
import logging
import re
from collections.abc import Sequence
from http import HTTPStatus
from importlib.util import find_spec

from omegaconf import DictConfig

from samestep.errors import RunError
from samestep.launch import kubectl
from samestep.launch import kubectl_errors as reasons
from samestep.launch.render import Document

NOTE = "kubectl.kubernetes.io/last-applied-configuration"  # by which the next submit knows this one


def is_installed() -> bool:
    """Whether the SDK is there: ``pip install 'project[kubeflow]'``."""
    return find_spec("kubeflow") is not None


def create(cfg: DictConfig, documents: Sequence[Document]) -> str:
    """Let kubectl apply what the TrainJob needs, and ``TrainerClient().train`` create it.

    ``documents`` are as rendered; the last one is the TrainJob.

    Returns:
        What was done, in lines.

    Raises:
        RunError: if the cluster refuses.
    """
    from kubeflow.common.types import KubernetesBackendConfig
    from kubeflow.trainer import CustomTrainerContainer, TrainerClient
    from kubeflow.trainer.options import Annotations, Labels, Name, TrainerArgs
    from kubernetes.client import ApiException
    from kubernetes.config import ConfigException

    *needed, job = documents
    meta, trainer = job["metadata"], job["spec"]["trainer"]
    said, done = kubectl.apply(cfg, needed), "created by Kubeflow's SDK"
    logging.getLogger("kubeflow").setLevel(logging.ERROR)  # warns if it may not read its version
    try:
        TrainerClient(KubernetesBackendConfig(namespace=cfg.cluster.namespace)).train(
            runtime=job["spec"]["runtimeRef"]["name"],
            # It has no numProcPerNode; the arguments say that too.
            trainer=CustomTrainerContainer(image=trainer["image"], num_nodes=trainer["numNodes"]),
            options=[
                Name(meta["name"]),
                Labels(meta["labels"]),
                Annotations({NOTE: json.dumps(job)}),
                TrainerArgs(trainer["args"]),
            ],
        )
    except (RuntimeError, TimeoutError, ConfigException) as error:
        cause = error.__cause__
        if not isinstance(cause, ApiException):
            raise RunError(reasons.explained(str(cause or error))) from None
        if cause.status != HTTPStatus.CONFLICT:
            answer = re.search(r'"message": ?("(?:[^"\\]|\\.)*")', cause.body or "")
            text = json.loads(answer[1]) if answer else str(cause.reason)
            raise RunError(reasons.explained(text)) from None
        done = "unchanged"
    return f"{said}trainjob.trainer.kubeflow.org/{meta['name']} {done}\n"
