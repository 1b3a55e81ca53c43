"""Make k8s/schemas.json.xz: what the API servers accept, small enough to be part of the repository.

python src/samestep/launch/schemas.py NAME=FILE...
python src/samestep/launch/schemas.py kubernetes-1.36=swagger.json jobset-0.12=jobsets.yaml

NAME=FILE  a release, and its swagger.json (the kinds in KINDS) or a CustomResourceDefinition (YAML)

Descriptions are left out. Fields that a schema does not list are refused, unless the API server
would keep them.
"""

import json
import lzma
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

SCHEMAS = Path(__file__).parents[3] / "k8s" / "schemas.json.xz"
KINDS = {  # of Kubernetes itself, and their names in addresses
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
RULES = (  # of a schema that are kept as they are
    *("type", "enum", "pattern", "minimum", "maximum", "required", "$ref"),
    *("minItems", "maxItems", "minLength", "maxLength", "maxProperties"),
)
POD_TEMPLATE = "io.k8s.api.core.v1.PodTemplateSpec"
METADATA = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
QUANTITY = r"^[+-]?(\d+\.?\d*|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?$"
SPECIAL = {  # written by hand where the swagger says only "string" or "object"
    "io.k8s.apimachinery.pkg.api.resource.Quantity": {
        "type": ["string", "number"],
        "pattern": QUANTITY,
    },
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString": {"type": ["string", "integer"]},
    "io.k8s.apimachinery.pkg.apis.meta.v1.FieldsV1": {"type": "object"},
}
CHOICES = {  # (field, another field beside it): values; the API server checks them in its code
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


def main(words: Sequence[str]) -> int:
    """Read the files, write the schemas."""
    if not words or any("=" not in word for word in words):
        print(__doc__)
        return 2
    kinds: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for name, file in (word.split("=", 1) for word in words):
        text = Path(file).read_text()
        if file.endswith(".json"):
            found = of_swagger(json.loads(text)["definitions"], definitions)
        else:
            found = of_resource(yaml.safe_load(text))
        kinds |= {kind: {"source": name, **entry} for kind, entry in found.items()}
    content = {"kinds": kinds, "definitions": shared(kinds, definitions)}
    packed = lzma.compress(json.dumps(content, separators=(",", ":"), sort_keys=True).encode())
    SCHEMAS.write_bytes(packed)
    print(f"{SCHEMAS.name}: {len(kinds)} kinds, {len(packed)} bytes")
    return 0


def of_swagger(swagger: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The kinds in KINDS; what they are made of goes to ``definitions``."""
    found = {}
    for node in swagger.values():
        for kind in node.get("x-kubernetes-group-version-kind", []):
            group = f"{kind['group']}/" if kind["group"] else ""
            key = f"{group}{kind['version']} {kind['kind']}"
            if key in KINDS:
                scoped = kind["kind"] != "Namespace"
                found[key] = {"plural": KINDS[key], "namespaced": scoped, "schema": strict(node)}
    todo = [METADATA, POD_TEMPLATE, *(name for e in found.values() for name in names(e))]
    while todo:
        name = todo.pop()
        if name not in definitions:
            definitions[name] = SPECIAL.get(name) or strict(swagger[name])
            todo += names(definitions[name])
    return found


def of_resource(crd: dict[str, Any]) -> dict[str, Any]:
    """The versions of a CustomResourceDefinition."""
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


def strict(node: Any, is_top: bool = True) -> Any:
    """The schema without its texts, and closed against fields that it does not list."""
    if node.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]} | {k: node[k] for k in ("pattern",) if k in node}
    kept: dict[str, Any] = {key: node[key] for key in RULES if key in node}
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            kept[key] = strict(node[key], is_top=False)
    if "properties" in node:
        fields = node["properties"]
        kept["properties"] = {name: strict(field, is_top=False) for name, field in fields.items()}
        for (name, beside), choices in CHOICES.items():
            if name in fields and beside in fields:
                kept["properties"][name] |= {"enum": choices}
        if is_top and "status" in fields:
            kept["properties"]["status"] = {}  # written by the cluster
        if (
            not node.get("x-kubernetes-preserve-unknown-fields")
            and "additionalProperties" not in kept
        ):
            kept["additionalProperties"] = False
    return kept


def names(node: Any) -> list[str]:
    """The definitions that a schema refers to."""
    if isinstance(node, dict):
        own = [str(node["$ref"]).rpartition("/")[2]] if "$ref" in node else []
        return [*own, *(name for value in node.values() for name in names(value))]
    return [name for value in node for name in names(value)] if isinstance(node, list) else []


def shared(kinds: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """``definitions``, and those of what the kinds repeat: less to read."""
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
    sys.exit(main(sys.argv[1:]))
