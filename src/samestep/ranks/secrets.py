"""What nobody may read: found by its name, or as the value of a variable, and replaced by ***."""

import os
import re
from typing import Any

_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_SECRET = r"(?:token|passw(?:or)?d|secret|api[-_]?key|access[-_]?key|credentials?)(?![a-z])"
_SECRET_NAME = re.compile(rf"(?<![a-z]){_SECRET}", re.IGNORECASE)
ARGUMENT = re.compile(rf"((?<![a-z]){_SECRET}[\w-]*\s*[=:]\s*).+", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(://)[^/\s@]+(@)")


def redact(text: str) -> str:
    """``text`` with the value of every secret environment variable replaced by ``***``."""
    values = {v for name, v in os.environ.items() if _VARIABLE.search(name) and len(v) >= 8}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "***")
    return text


def redacted(value: Any, *, secret: bool = False) -> Any:
    """``value`` with ``***`` for what keys such as ``api_key``, the environment and URLs hide."""
    if isinstance(value, dict):
        names = {key: secret or bool(_SECRET_NAME.search(str(key))) for key in value}
        return {key: redacted(value[key], secret=names[key]) for key in value}
    if isinstance(value, list):
        return [redacted(item, secret=secret) for item in value]
    if isinstance(value, str):
        return "***" if secret else _URL_PASSWORD.sub(r"\1***\2", redact(value))
    return value
