"""Images that may become others."""

import pytest

from samestep.launch.check.images import is_pinned
from tests.samestep.launch.check.planting import CONTAINER, found


def test_an_image_by_digest_or_by_a_tag_behind_a_port_is_pinned():
    assert is_pinned(f"host:5000/project@sha256:{'0' * 64}")
    assert is_pinned("host:5000/project:1.0")
    assert not is_pinned("host:5000/project")
    assert not is_pinned("project:latest")
    assert not is_pinned("project@sha256:123")


@pytest.mark.parametrize(
    ("target", "place", "image"),
    [("k8s", f"Job:{CONTAINER}.image", "project"),
     ("elastic", f"Deployment:{CONTAINER}.image", "etcd:latest")],
)  # fmt: skip
def test_every_image_of_every_document_is_pinned(target, place, image):
    (fault,) = found(target, **{place: image})
    assert f"{CONTAINER}.image={image}: may name another image tomorrow" in fault
