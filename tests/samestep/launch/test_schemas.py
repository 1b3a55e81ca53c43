"""What an API server would not know, in any object and any pod template."""

import json

import pytest
import yaml

from samestep.launch import check, rules, schemas
from tests.samestep.launch.test_check import TARGETS, C, S, composed, found

SCHEMA = [
    (f"Job:{C}.imagePullPolcy", "Always",
     "containers[0].imagePullPolcy: no such field; did you mean imagePullPolicy?"),
    ("Job:spec.backofLimit", 3, "spec.backofLimit: no such field; did you mean backoffLimit?"),
    ("Job:metdata", {}, "Job mine: metdata: no such field; did you mean metadata?"),
    (f"Job:{C}.imagePullPolicy", "Alway",
     "must be one of Always, IfNotPresent, Never; did you mean Always?"),
    ("Job:spec.completionMode", "Index", "did you mean Indexed?"),
    (f"Job:{S}.restartPolicy", "never", "did you mean Never?"),
    ("Job:spec.backoffLimit", "3", 'spec.backoffLimit="3": must be a whole number'),
    (f"Job:{C}.env[0].value", 3, "containers[0].env[0].value=3: must be text"),
    (f"Job:{C}.args", "x", "must be a list"),
    (f"Job:{C}.resources.limits.memory", "16 GB",
     "limits.memory=16 GB: must be a quantity, such as 2, 500m or 16Gi"),
    (f"Job:{C}.name", None, "containers[0].name: is missing"),
    ("Job:apiVersion", "batch/v2",
     "batch/v2 Job: is none of the kinds whose schema is known; did you mean batch/v1 Job?"),
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
    pods = [pod for document in documents for _, pod in rules.pods(document)]
    assert pods
    for pod in pods:
        pod["spec"]["containers"][0]["imagePullPolcy"] = "Always"
    faults = list(check.faults(cfg, documents))
    assert len(faults) == len(pods)
    assert all("no such field; did you mean imagePullPolicy?" in fault for fault in faults)


def test_schemas_are_small_and_say_where_they_come_from():
    assert schemas.SCHEMAS.stat().st_size < 50_000
    sources = {kind.split()[1]: entry["source"] for kind, entry in check.schemas()["kinds"].items()}
    assert sources["Job"] == "kubernetes-1.36"
    assert sources["JobSet"] == "jobset-0.12.0"
    assert "description" not in json.dumps(check.schemas()["definitions"][schemas.POD_TEMPLATE])


def test_schemas_are_made_from_a_swagger_and_custom_resources(tmp_path, monkeypatch):
    monkeypatch.setattr(schemas, "SCHEMAS", tmp_path / "schemas.json.xz")
    monkeypatch.setattr(check, "SCHEMAS", tmp_path / "schemas.json.xz")
    quantity = "io.k8s.apimachinery.pkg.api.resource.Quantity"
    ref = {"$ref": f"#/definitions/{quantity}"}
    pod = {
        "description": "long", "type": "object",
        "properties": {"kind": {"type": "string"}, "apiVersion": {"type": "string"},
                       "metadata": {"$ref": f"#/definitions/{schemas.METADATA}"}, "size": ref},
        "x-kubernetes-group-version-kind": [{"group": "", "version": "v1", "kind": "Pod"}],
    }  # fmt: skip
    meta = {"type": "object", "properties": {"name": {"type": "string"}}}
    swagger = {"Pod": pod, schemas.METADATA: meta, quantity: {"type": "string"},
               schemas.POD_TEMPLATE: {"type": "object"}}  # fmt: skip
    (tmp_path / "swagger.json").write_text(json.dumps({"definitions": swagger}))
    thing = {"spec": {"type": "object", "required": ["n"], "properties": {
        "n": {"type": "integer", "minimum": 1},
        "any": {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": {}},
        "port": {"x-kubernetes-int-or-string": True}}}}  # fmt: skip
    thing |= {name: {"type": "string"} for name in ("kind", "apiVersion")}
    version = {"name": "v1", "schema": {"openAPIV3Schema": {"type": "object", "properties": thing}}}
    names = {"kind": "Thing", "plural": "things"}
    crd = {"spec": {"group": "x.io", "names": names, "scope": "Namespaced", "versions": [version]}}
    (tmp_path / "crd.yaml").write_text(yaml.safe_dump(crd))
    words = [f"k8s-1={tmp_path / 'swagger.json'}", f"things-2={tmp_path / 'crd.yaml'}"]
    assert schemas.main(words) == 0
    check.schemas.cache_clear()
    try:
        head = {"apiVersion": "x.io/v1", "kind": "Thing", "metadata": {"name": "a"}}
        good = {**head, "spec": {"n": 1, "any": {"x": 1}, "port": "http"}}
        assert list(check.of_schema(good)) == []
        bad = {**head, "spec": {"n": 0, "nn": 1, "port": []}}
        assert len(list(check.of_schema(bad))) == 3
        small = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "size": "1.5Gi"}
        assert list(check.of_schema(small)) == []
        assert "must be a quantity" in "".join(check.of_schema(small | {"size": "1.5GB"}))
    finally:
        check.schemas.cache_clear()
    assert schemas.main(["swagger.json"]) == 2
