"""Create a TrainJob with Kubeflow's own SDK, as its users do in notebooks."""

import json
import logging
import re
from http import HTTPStatus
from importlib.util import find_spec
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from samestep.errors import RunError
from samestep.launch import kubectl
from samestep.launch.explain import explain_error
from samestep.launch.render import Manifest

if TYPE_CHECKING:
    from kubernetes.client import ApiException

SUBMITTED_ANNOTATION = "kubectl.kubernetes.io/last-applied-configuration"
"""Where kubectl notes what was submitted; the next submit compares itself with it."""
MESSAGE = re.compile(r'"message": ?("(?:[^"\\]|\\.)*")')
"""The message in an answer of the API server, as a text of JSON."""


def is_installed() -> bool:
    """Whether the SDK is installed; it is the extra ``kubeflow`` in pyproject.toml."""
    return find_spec("kubeflow") is not None


def create(cfg: DictConfig, job: Manifest) -> str:
    """Create the TrainJob by ``TrainerClient().train``; return what was done in one line."""
    from kubeflow.common.types import KubernetesBackendConfig
    from kubeflow.trainer import CustomTrainerContainer, TrainerClient
    from kubeflow.trainer.options import Annotations, Labels, Name, TrainerArgs
    from kubernetes.client import ApiException
    from kubernetes.config import ConfigException

    metadata, trainer = job["metadata"], job["spec"]["trainer"]
    # The SDK warns where a user may not read the version of Trainer, which is no problem.
    logging.getLogger("kubeflow").setLevel(logging.ERROR)
    options = [
        Name(metadata["name"]),
        Labels(metadata["labels"]),
        # What kubectl would note, so that the next submit can tell whether it is the same.
        Annotations({**metadata["annotations"], SUBMITTED_ANNOTATION: json.dumps(job)}),
        TrainerArgs(trainer["args"]),
    ]
    try:
        TrainerClient(KubernetesBackendConfig(namespace=cfg.cluster.namespace)).train(
            runtime=job["spec"]["runtimeRef"]["name"],
            # The SDK has no numProcPerNode; --nproc-per-node is among the arguments.
            trainer=CustomTrainerContainer(image=trainer["image"], num_nodes=trainer["numNodes"]),
            options=options,
        )
    except (RuntimeError, TimeoutError, ConfigException) as error:
        # The SDK puts errors of its own around those of the API server.
        cause = error.__cause__
        if not isinstance(cause, ApiException):
            raise RunError(explain_error(str(cause or error))) from None
        message = explain_error(read_message(cause))
        if cause.status == HTTPStatus.CONFLICT:
            raise kubectl.AlreadyExistsError(message) from None
        raise RunError(message) from None
    return f"trainjob.trainer.kubeflow.org/{metadata['name']} created by Kubeflow's SDK\n"


def read_message(error: "ApiException") -> str:
    """Return what the API server says about a request that it rejected."""
    # The body may be cut, so that it is no valid JSON.
    answer = MESSAGE.search(error.body or "")
    if answer is None:
        return str(error.reason)
    return str(json.loads(answer[1]))
