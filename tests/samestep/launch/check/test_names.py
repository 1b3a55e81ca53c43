"""Names and labels that a cluster refuses."""

import pytest

from tests.samestep.launch.check.planting import found

NAMES = [
    ("Job:metadata.labels.team", "a b", "metadata.labels[team]=a b: must be at most 63"),
    ("Job:spec.template.metadata.labels.team", "-a", "labels[team]=-a: must be at most 63"),
    ("Service:metadata.name", "1-run", "metadata.name=1-run: must be at most 63 of a-z 0-9 -"),
    ("Service:metadata.name", "a" * 64, "must be at most 63 of a-z 0-9 -"),
]


@pytest.mark.parametrize(("place", "value", "message"), NAMES)
def test_a_name_or_label_that_a_cluster_refuses(place, value, message):
    (fault,) = found(**{place: value})
    assert message in fault


@pytest.mark.parametrize("value", ["", "a", "A.b_c-1", "a" * 63])
def test_a_label_that_a_cluster_accepts(value):
    assert found(**{"Job:metadata.labels.team": value}) == []
