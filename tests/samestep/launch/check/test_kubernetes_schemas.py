"""What an API server would not know, in any object and any pod template."""

import json

import pytest

from samestep.launch import check
from samestep.launch.check import kubernetes_schemas
from samestep.launch.check.documents import find_pods
from tests.make_schemas import POD_TEMPLATE
from tests.samestep.launch.check.planting import CONTAINER, POD, TARGETS, composed, found

SCHEMA = [
    (f"Job:{CONTAINER}.imagePullPolcy", "Always",
     "containers[0].imagePullPolcy: no such field; did you mean imagePullPolicy?"),
    ("Job:spec.backofLimit", 3, "spec.backofLimit: no such field; did you mean backoffLimit?"),
    ("Job:metdata", {}, "Job mine: metdata: no such field; did you mean metadata?"),
    (f"Job:{CONTAINER}.imagePullPolicy", "Alway",
     "must be one of Always, IfNotPresent, Never; did you mean Always?"),
    ("Job:spec.completionMode", "Index", "did you mean Indexed?"),
    (f"Job:{POD}.restartPolicy", "never", "did you mean Never?"),
    ("Job:spec.backoffLimit", "3", 'spec.backoffLimit="3": must be a whole number'),
    (f"Job:{CONTAINER}.env[0].value", 3, "containers[0].env[0].value=3: must be text"),
    (f"Job:{CONTAINER}.args", "x", "must be a list"),
    (f"Job:{CONTAINER}.resources.limits.memory", "16 GB",
     "limits.memory=16 GB: must be a quantity, such as 2, 500m or 16Gi"),
    (f"Job:{CONTAINER}.name", None, "containers[0].name: is missing"),
    ("Job:apiVersion", "batch/v2",
     "batch/v2 Job: no schema is known for this kind; did you mean batch/v1 Job?"),
    ("Job:metadata.name", None, "metadata.name: is missing"),
    ("NetworkPolicy:spec.policyType", ["Ingress"], "did you mean policyTypes?"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "value", "message"), SCHEMA)
def test_a_field_or_value_that_the_server_does_not_know(place, value, message):
    faults = found(**{place: value})
    assert any(message in fault for fault in faults), faults
    assert all(fault.count("\n") == 0 for fault in faults)


@pytest.mark.parametrize("target", TARGETS)
def test_a_wrong_field_in_the_pod_template_of_every_target(target):
    cfg, documents = composed(target)
    pods = [pod for document in documents for _, pod in find_pods(document)]
    assert pods
    for pod in pods:
        pod["spec"]["containers"][0]["imagePullPolcy"] = "Always"
    faults = list(check.faults(cfg, documents))
    assert len(faults) == len(pods)
    assert all("no such field; did you mean imagePullPolicy?" in fault for fault in faults)


def test_schemas_are_small_and_say_where_they_come_from():
    assert kubernetes_schemas.SCHEMAS.stat().st_size < 50_000
    sources = {kind.split()[1]: entry["source"] for kind, entry in check.schemas()["kinds"].items()}
    assert sources["Job"] == "kubernetes-1.36"
    assert sources["JobSet"] == "jobset-0.12.0"
    assert "description" not in json.dumps(check.schemas()["definitions"][POD_TEMPLATE])
