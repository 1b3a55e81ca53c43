"""Rules that belong to one kind of object: all targets keep them."""

import pytest

from samestep.launch.check.api_rules import check_api_rules
from tests.samestep.launch.check.planting import POD, TARGETS, found, refused

DEPLOYMENT = [
    ("spec.selector.matchLabels.[app.kubernetes.io/name]", "x", "spec.selector: must be some of"),
    ("spec.selector.matchLabels", {}, "spec.selector: must be some of the labels of its pods"),
    ("spec.template.spec.restartPolicy", "Never", "must be Always in a Deployment"),
    ("spec.template.spec.containers[0].ports[0].containerPort", 0, "must be from 1 to 65535"),
]


@pytest.mark.parametrize("target", TARGETS)
def test_no_target_breaks_a_rule(target):
    assert refused(target) == []


@pytest.mark.parametrize(("place", "value", "message"), DEPLOYMENT)
def test_a_mistake_in_a_deployment_is_found(place, value, message):
    (fault,) = refused("elastic", **{f"Deployment:{place}": value})
    assert message in fault


@pytest.mark.parametrize(
    ("place", "fault"),
    [("Service:spec", "spec: is missing"), (f"Job:{POD}", "spec.template.spec: is missing")],
)
def test_an_object_without_content_is_no_traceback(place, fault):
    assert refused(**{place: None}) == [fault]
    assert f"mine: {fault}" in found(**{place: None})[0]


def test_other_kinds_have_no_rules():
    assert list(check_api_rules({"kind": "ConfigMap", "metadata": {"name": "a"}})) == []
