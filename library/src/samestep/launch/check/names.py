"""Names and labels that Kubernetes accepts."""

import re
from collections.abc import Iterator

from samestep.launch.check.documents import walk_mappings
from samestep.launch.render import Document

LONGEST = 63  # characters of a name in DNS, and of the value of a label
NAME = re.compile(rf"[a-z]([-a-z0-9]{{0,{LONGEST - 2}}}[a-z0-9])?")  # also for a Service
NAME_RULE = f"at most {LONGEST} of a-z 0-9 -, the first a letter, the last not -"
NAMESPACE = re.compile(rf"[a-z0-9]([-a-z0-9]{{0,{LONGEST - 2}}}[a-z0-9])?")
NAMESPACE_RULE = f"at most {LONGEST} of a-z 0-9 -, the first and last not -"
LABEL = re.compile(rf"([A-Za-z0-9]([-\w.]{{0,{LONGEST - 2}}}[A-Za-z0-9])?)?")
LABEL_RULE = f"at most {LONGEST} of A-Z a-z 0-9 - _ ., the first and last a letter or digit"
DOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
DOMAIN_RULE = "at most 253 of a-z 0-9 - ., the first and last not - or ."
KEY_RULE = f"{LABEL_RULE}; a domain and / may stand before it"
LABELS = ("labels", "matchLabels", "nodeSelector", "selector")
"""Fields that hold labels; a Service's selector does, too."""


def check_names(document: Document) -> Iterator[str]:
    """Yield the name of the object, and each of its labels, that the cluster would refuse."""
    name = document["metadata"]["name"]
    if not NAME.fullmatch(name):
        yield f"metadata.name={name}: must be {NAME_RULE}; choose another RUN_ID"
    yield from check_labels(document)


def check_labels(document: Document) -> Iterator[str]:
    """Yield each label and each key of an annotation that the cluster would refuse."""
    for path, node in walk_mappings(document):
        field = path.rpartition(".")[2]
        if field in (*LABELS, "annotations"):
            yield from (f"{path}[{key}]: must be {KEY_RULE}" for key in node if not is_key(key))
        if field in LABELS:
            for key, value in node.items():
                if isinstance(value, str) and not LABEL.fullmatch(value):
                    yield f"{path}[{key}]={value}: must be {LABEL_RULE}"


def is_key(key: str) -> bool:
    """Whether ``key`` may be the key of a label or an annotation, such as ``example.com/team``."""
    domain, slash, name = key.rpartition("/")
    return bool(name and LABEL.fullmatch(name) and (DOMAIN.fullmatch(domain) or not slash))
