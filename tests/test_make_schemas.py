"""How launch/check/schemas.json.xz is made."""

import json

import yaml

from samestep.launch.check import kubernetes_schemas
from samestep.launch.check.kubernetes_schemas import check_schema, schemas
from tests.make_schemas import METADATA, POD_TEMPLATE, main


def test_schemas_are_made_from_a_swagger_and_custom_resources(tmp_path, monkeypatch):
    monkeypatch.setattr(kubernetes_schemas, "SCHEMAS", tmp_path / "schemas.json.xz")
    quantity = "io.k8s.apimachinery.pkg.api.resource.Quantity"
    ref = {"$ref": f"#/definitions/{quantity}"}
    pod = {
        "description": "long", "type": "object",
        "properties": {"kind": {"type": "string"}, "apiVersion": {"type": "string"},
                       "metadata": {"$ref": f"#/definitions/{METADATA}"}, "size": ref},
        "x-kubernetes-group-version-kind": [{"group": "", "version": "v1", "kind": "Pod"}],
    }  # fmt: skip
    meta = {"type": "object", "properties": {"name": {"type": "string"}}}
    swagger = {"Pod": pod, METADATA: meta, quantity: {"type": "string"},
               POD_TEMPLATE: {"type": "object"}}  # fmt: skip
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
    argv = [f"k8s-1={tmp_path / 'swagger.json'}", f"things-2={tmp_path / 'crd.yaml'}"]
    assert main(argv) == 0
    schemas.cache_clear()
    try:
        head = {"apiVersion": "x.io/v1", "kind": "Thing", "metadata": {"name": "a"}}
        good = {**head, "spec": {"n": 1, "any": {"x": 1}, "port": "http"}}
        assert list(check_schema(good)) == []
        bad = {**head, "spec": {"n": 0, "nn": 1, "port": []}}
        assert len(list(check_schema(bad))) == 3
        small = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "size": "1.5Gi"}
        assert list(check_schema(small)) == []
        assert "must be a quantity" in "".join(check_schema(small | {"size": "1.5GB"}))
    finally:
        schemas.cache_clear()
    assert main(["swagger.json"]) == 2
