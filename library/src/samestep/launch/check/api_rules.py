"""What API servers and webhooks refuse in code, so that no schema has it; one message for each."""

from collections.abc import Callable, Iterator

from samestep.launch.check.documents import find_pods
from samestep.launch.check.jobs import check_job
from samestep.launch.check.network import check_network_policy, check_service
from samestep.launch.check.operators import (
    check_jobset,
    check_pytorch_job,
    check_train_job,
    check_training_runtime,
)
from samestep.launch.check.pods import check_pod
from samestep.launch.render import Document


def check_api_rules(document: Document) -> Iterator[str]:
    """Yield what would be refused of an object that its schema has accepted.

    The pods within the objects of operators are left out: nobody judges them before the operator
    makes them (``controllers``).
    """
    kind = document["kind"]
    if kind in BY_KIND and "spec" not in document:
        yield "spec: is missing"
        return
    if kind in KINDS_WITH_PODS:
        for path, pod in find_pods(document):
            yield from check_pod(pod, path)
    if kind in BY_KIND:
        yield from BY_KIND[kind](document)


def check_deployment(deployment: Document) -> Iterator[str]:
    """A Deployment selects its own pods, which restart always."""
    spec = deployment["spec"]
    labels = spec["template"].get("metadata", {}).get("labels", {})
    selector = spec["selector"].get("matchLabels", {})
    if not selector or not selector.items() <= labels.items():
        yield "spec.selector: must be some of the labels of its pods"
    policy = spec["template"]["spec"].get("restartPolicy", "Always")
    if policy != "Always":
        yield f"spec.template.spec.restartPolicy={policy}: must be Always in a Deployment"


KINDS_WITH_PODS = ("Job", "Deployment", "Pod")
BY_KIND: dict[str, Callable[[Document], Iterator[str]]] = {
    "Deployment": check_deployment,
    "Job": check_job,
    "JobSet": check_jobset,
    "NetworkPolicy": check_network_policy,
    "PyTorchJob": check_pytorch_job,
    "Service": check_service,
    "TrainingRuntime": check_training_runtime,
    "TrainJob": check_train_job,
}
