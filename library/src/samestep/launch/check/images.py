"""Container images must be pinned: the same name always means the same image."""

from collections.abc import Iterator

from samestep.launch.check.documents import walk_mappings
from samestep.launch.render import Document

RULE = "may name another image tomorrow; use a tag other than latest, or a digest"


def check_images(document: Document) -> Iterator[str]:
    """Yield every image in ``document`` that is not pinned."""
    for path, node in walk_mappings(document):
        image = node.get("image")
        if isinstance(image, str) and not is_pinned(image):
            yield f"{path}.image={image}: {RULE}"


def is_pinned(image: str) -> bool:
    """Whether ``image`` has a digest, or a tag other than ``latest``."""
    name, _, digest = image.partition("@")
    if digest:
        return digest.startswith("sha256:") and len(digest) == len("sha256:") + 64
    # A colon before the last slash belongs to the registry's port.
    _, _, tag = name.rpartition("/")[2].partition(":")
    return tag not in ("", "latest")
