"""Fields, types and values that the API servers accept, by the schemas in schemas.json.xz.

tests/make_schemas.py makes that file.
"""

import json
import lzma
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from jsonschema import Draft7Validator, ValidationError

from samestep.hydra.schema import nearest
from samestep.launch.check.documents import join_path
from samestep.launch.render import Document

SCHEMAS = Path(__file__).with_name("schemas.json.xz")

TYPES = {  # of JSON Schema, in plain words
    "object": "keys and values",
    "array": "a list",
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
}


@cache
def schemas() -> Document:
    """The content of schemas.json.xz: ``kinds``, and the ``definitions`` that they share."""
    content: Document = json.loads(lzma.decompress(SCHEMAS.read_bytes()))
    return content


def check_schema(document: Document) -> Iterator[str]:
    """Yield the fields, types and values in ``document`` that the API server does not know."""
    kinds = schemas()["kinds"]
    kind = f"{document.get('apiVersion')} {document.get('kind')}"
    if kind not in kinds:
        near = nearest(kind, kinds)
        hint = f"did you mean {near}?" if near else f"known are {', '.join(kinds)}"
        yield f"{kind}: no schema is known for this kind; {hint}"
        return
    if not (document.get("metadata") or {}).get("name"):
        yield "metadata.name: is missing"
    for error in find_errors(kind, document):
        yield from describe(error)


def find_errors(kind: str, document: Document) -> list[ValidationError]:
    """The violations of the schema of ``kind``, ordered by their place in ``document``."""
    schema = {**schemas()["kinds"][kind]["schema"], "definitions": schemas()["definitions"]}
    errors = Draft7Validator(schema).iter_errors(document)
    return sorted(errors, key=lambda error: [str(part) for part in error.absolute_path])


def describe(error: ValidationError) -> Iterator[str]:
    """Yield the error in plain words; one line for each field that is unknown or missing."""
    path = join_path("", error.absolute_path)
    match error.validator:  # the rule of JSON Schema that is violated
        case "additionalProperties":
            yield from _describe_unknown_fields(path, error)
        case "required":
            yield from _describe_missing_fields(path, error)
        case "type":
            yield _describe_wrong_type(path, error)
        case "enum":
            yield _describe_wrong_choice(path, error)
        case "pattern" if "KMGTPE" in error.validator_value:
            yield f"{path}={error.instance}: must be a quantity, such as 2, 500m or 16Gi"
        case _:
            yield f"{path}: {error.message}"


def _describe_unknown_fields(path: str, error: ValidationError) -> Iterator[str]:
    known = error.schema["properties"]
    for key in sorted(error.instance.keys() - known.keys()):
        near = nearest(key, known)
        hint = f"did you mean {near}?" if near else f"there is {', '.join(sorted(known))}"
        yield f"{join_path(path, [key])}: no such field; {hint}"


def _describe_missing_fields(path: str, error: ValidationError) -> Iterator[str]:
    for key in sorted(set(error.validator_value) - error.instance.keys()):
        yield f"{join_path(path, [key])}: is missing"


def _describe_wrong_type(path: str, error: ValidationError) -> str:
    rule = error.validator_value
    types = [rule] if isinstance(rule, str) else rule
    # Only quantities may be text or a number, and must have the form of one.
    hint = ", such as 500m" if "pattern" in error.schema else ""
    wanted = " or ".join(TYPES[name] for name in types)
    return f"{path}={json.dumps(error.instance)}: must be {wanted}{hint}"


def _describe_wrong_choice(path: str, error: ValidationError) -> str:
    choices = error.validator_value
    near = nearest(str(error.instance), [choice for choice in choices if choice])
    hint = f"; did you mean {near}?" if near else ""
    known = ", ".join(map(str, choices))
    return f"{path}={json.dumps(error.instance)}: must be one of {known}{hint}"
