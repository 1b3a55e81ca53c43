"""All checks of a run that a cluster is to get: its configuration first, then its documents."""

from collections.abc import Iterable, Iterator, Sequence

from omegaconf import DictConfig

from samestep.errors import ConfigError
from samestep.launch.check.api_rules import check_api_rules
from samestep.launch.check.cluster_rules import check_cluster
from samestep.launch.check.controllers import make_objects
from samestep.launch.check.documents import find_pods
from samestep.launch.check.images import check_images
from samestep.launch.check.kubernetes_schemas import check_schema
from samestep.launch.check.names import check_names
from samestep.launch.check.pod_security import check_pod_security
from samestep.launch.check.secrets import check_secrets, check_secrets_of_configuration
from samestep.launch.render import Document


def refuse(faults: Iterable[str]) -> None:
    """Raise a ConfigError with these lines, each once. Without any, do nothing."""
    if lines := list(dict.fromkeys(faults)):
        raise ConfigError("\n".join(lines))


def faults(cfg: DictConfig, documents: Sequence[Document]) -> Iterator[str]:
    """Yield the mistakes in ``cfg`` for its cluster; without any, those in the documents.

    The documents are rendered from ``cfg``, so its mistakes would only be repeated there.

    Args:
        cfg: composed for a cluster; its ``run_id`` is set.
        documents: what ``render`` made of it.
    """
    found = [*check_cluster(cfg), *check_secrets_of_configuration(cfg)]
    if found:
        yield from found
        return

    # Only Kubernetes has namespaces; the documents of other targets are known to no schema.
    has_schema = "namespace" in cfg.cluster
    for document in documents:
        if has_schema or "apiVersion" in document:
            title = find_title(document)
            found += [f"{title}: {fault}" for fault in check_object(document)]
        else:
            found += [*check_secrets(document), *check_images(document)]
    yield from found
    if has_schema and not found:
        yield from check_made_objects(documents)


def check_made_objects(documents: Sequence[Document]) -> Iterator[str]:
    """Yield what the API server would refuse of the objects that controllers make of ours."""
    for origin, made in make_objects(documents):
        title = f"{find_title(origin)}: its {find_title(made)}"
        yield from (f"{title}: {fault}" for fault in check_api_rules(made))


def check_object(document: Document) -> Iterator[str]:
    """Yield the mistakes in an object for Kubernetes."""
    yield from check_secrets(document)
    by_schema = list(check_schema(document))
    if by_schema:
        # The other checks rely on fields and types that the schema has confirmed.
        yield from by_schema
        return
    by_name = list(check_names(document))
    yield from by_name
    yield from check_images(document)
    if not by_name:
        yield from check_api_rules(document)
    for path, pod in find_pods(document):
        yield from check_pod_security(pod, path)


def find_title(document: Document) -> str:
    """The kind and name of the object, such as ``Job mine``."""
    name = (document.get("metadata") or {}).get("name", "")
    return f"{document.get('kind', 'document')} {name}".strip()
