"""Make launch/check/schemas.json.xz: what the API servers accept, small enough to be kept in git.

python -m tests.make_schemas NAME=FILE...
python -m tests.make_schemas kubernetes-1.36=swagger.json jobset-0.12=jobsets.yaml

NAME=FILE  a release, and its swagger.json (the kinds in KINDS) or a CustomResourceDefinition (YAML)

The schemas keep no descriptions. They refuse a field that they do not list, unless the API server
would keep such a field.
"""

import json
import lzma
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from samestep.launch.check import kubernetes_schemas
from samestep.launch.check.quantities import QUANTITY
from samestep.ranks import process

KINDS = {  # kinds of Kubernetes itself, and their names in URLs
    "v1 ConfigMap": "configmaps",
    "v1 Event": "events",
    "v1 Namespace": "namespaces",
    "v1 PersistentVolumeClaim": "persistentvolumeclaims",
    "v1 Pod": "pods",
    "v1 Secret": "secrets",
    "v1 Service": "services",
    "v1 ServiceAccount": "serviceaccounts",
    "apps/v1 Deployment": "deployments",
    "apps/v1 StatefulSet": "statefulsets",
    "batch/v1 Job": "jobs",
    "networking.k8s.io/v1 NetworkPolicy": "networkpolicies",
    "policy/v1 PodDisruptionBudget": "poddisruptionbudgets",
}
RULES = (  # rules of a schema that are copied unchanged
    *("type", "enum", "pattern", "minimum", "maximum", "required", "$ref"),
    *("minItems", "maxItems", "minLength", "maxLength", "maxProperties"),
)
POD_TEMPLATE = "io.k8s.api.core.v1.PodTemplateSpec"
METADATA = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
SPECIAL = {  # written by hand, because the swagger says only "string" or "object"
    "io.k8s.apimachinery.pkg.api.resource.Quantity": {
        "type": ["string", "number"],
        "pattern": QUANTITY,
    },
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString": {"type": ["string", "integer"]},
    "io.k8s.apimachinery.pkg.apis.meta.v1.FieldsV1": {"type": "object"},
}
# The API server checks these values in code, so that its swagger does not list them.
CHOICES = {  # (field, another field beside it): values
    ("imagePullPolicy", "image"): ["Always", "IfNotPresent", "Never"],
    ("terminationMessagePolicy", "image"): ["File", "FallbackToLogsOnError"],
    ("restartPolicy", "containers"): ["Always", "OnFailure", "Never"],
    ("dnsPolicy", "containers"): ["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"],
    ("fsGroupChangePolicy", "fsGroup"): ["OnRootMismatch", "Always"],
    ("medium", "sizeLimit"): ["", "Memory", "HugePages"],
    ("protocol", "containerPort"): ["TCP", "UDP", "SCTP"],
    ("effect", "tolerationSeconds"): ["NoSchedule", "PreferNoSchedule", "NoExecute"],
    ("operator", "tolerationSeconds"): ["Exists", "Equal", "Lt", "Gt"],
    ("completionMode", "completions"): ["Indexed", "NonIndexed"],
    ("podReplacementPolicy", "completions"): ["TerminatingOrFailed", "Failed"],
    ("action", "onExitCodes"): ["FailJob", "FailIndex", "Ignore", "Count"],
    ("operator", "containerName"): ["In", "NotIn"],
    ("type", "clusterIP"): ["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"],
}


def main(argv: Sequence[str]) -> int:
    """Read the files and write the schemas."""
    if not argv or any("=" not in argument for argument in argv):
        print(__doc__)
        return 2
    kinds: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for name, file in (argument.split("=", 1) for argument in argv):
        text = Path(file).read_text()
        if file.endswith(".json"):
            found = read_swagger(json.loads(text)["definitions"], definitions)
        else:
            found = read_resource(yaml.safe_load(text))
        kinds |= {kind: {"source": name, **entry} for kind, entry in found.items()}
    content = {"kinds": kinds, "definitions": share_repeated(kinds, definitions)}
    packed = lzma.compress(json.dumps(content, separators=(",", ":"), sort_keys=True).encode())
    kubernetes_schemas.SCHEMAS.write_bytes(packed)
    print(f"{kubernetes_schemas.SCHEMAS.name}: {len(kinds)} kinds, {len(packed)} bytes")
    return 0


def read_swagger(swagger: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the kinds in KINDS; add the definitions that they refer to to ``definitions``."""
    found = {}
    for node in swagger.values():
        for kind in node.get("x-kubernetes-group-version-kind", []):
            group = f"{kind['group']}/" if kind["group"] else ""
            key = f"{group}{kind['version']} {kind['kind']}"
            if key in KINDS:
                scoped = kind["kind"] != "Namespace"
                found[key] = {"plural": KINDS[key], "namespaced": scoped, "schema": strict(node)}
    todo = [METADATA, POD_TEMPLATE, *(name for e in found.values() for name in list_references(e))]
    while todo:
        name = todo.pop()
        if name not in definitions:
            definitions[name] = SPECIAL.get(name) or strict(swagger[name])
            todo += list_references(definitions[name])
    return found


def read_resource(crd: dict[str, Any]) -> dict[str, Any]:
    """Return each version of a CustomResourceDefinition as a kind."""
    spec, found = crd["spec"], {}
    for version in spec["versions"]:
        schema = strict(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"$ref": f"#/definitions/{METADATA}"}
        kind = f"{spec['group']}/{version['name']} {spec['names']['kind']}"
        scoped = spec["scope"] == "Namespaced"
        if spec["names"]["kind"] == "ElasticJob":  # it says of a replica only that it is an object
            schema["properties"]["spec"]["properties"]["replicaSpecs"] = REPLICAS
        found[kind] = {"plural": spec["names"]["plural"], "namespaced": scoped, "schema": schema}
    return found


REPLICAS = {
    "type": "object",
    "additionalProperties": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "replicas": {"type": "integer"},
            "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
            "template": {"$ref": f"#/definitions/{POD_TEMPLATE}"},
        },
    },
}


def strict(node: Any) -> Any:
    """Return the schema of an object without descriptions; it refuses fields it does not list."""
    schema = strict_field(node)
    if "status" in schema.get("properties", {}):
        schema["properties"]["status"] = {}  # written by the cluster, in any form
    return schema


def strict_field(node: Any) -> Any:
    """Return the schema of a field without descriptions; it refuses fields it does not list."""
    if node.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]} | {k: node[k] for k in ("pattern",) if k in node}
    kept: dict[str, Any] = {key: node[key] for key in RULES if key in node}
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            kept[key] = strict_field(node[key])
    if "properties" in node:
        kept["properties"] = strict_properties(node["properties"])
        keeps_unknown = node.get("x-kubernetes-preserve-unknown-fields")
        if not keeps_unknown and "additionalProperties" not in kept:
            kept["additionalProperties"] = False
    return kept


def strict_properties(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the schemas of an object's fields, with the values in CHOICES."""
    kept = {name: strict_field(field) for name, field in fields.items()}
    for (name, beside), choices in CHOICES.items():
        if name in fields and beside in fields:
            kept[name] |= {"enum": choices}
    return kept


def list_references(node: Any) -> list[str]:
    """Return the names of the definitions that a schema refers to."""
    if isinstance(node, list):
        return [name for item in node for name in list_references(item)]
    if not isinstance(node, dict):
        return []
    found = [name for item in node.values() for name in list_references(item)]
    if "$ref" in node:
        found.append(str(node["$ref"]).rpartition("/")[2])
    return found


def share_repeated(kinds: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return ``definitions``, and a definition for each schema that the kinds repeat."""
    seen: dict[str, dict[str, Any]] = {}

    def share(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        node = {key: share(value) for key, value in node.items()}
        if "properties" not in node or len(text := json.dumps(node, sort_keys=True)) < 300:
            return node
        name = f"shared{len(seen)}" if text not in seen else seen[text]["name"]
        seen[text] = {"name": name, "node": node}
        return {"$ref": f"#/definitions/{name}"}

    for entry in kinds.values():
        entry["schema"] = share(entry["schema"])
    return definitions | {entry["name"]: entry["node"] for entry in seen.values()}


if __name__ == "__main__":
    process.run(lambda: main(sys.argv[1:]))
