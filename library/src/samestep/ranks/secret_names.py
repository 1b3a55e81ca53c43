"""Names of values that are secrets, such as ``api_key``. A message never shows such a value."""

import re

HIDDEN = "***"

# Words in names such as HF_TOKEN, aws_secret_access_key, db.password, OPENAI_APIKEY. A single "key"
# is no secret, because tolerations have keys; "tokens" are words of a text.
_NAME = (
    r"(?:token|secret|passw(?:or)?d|passphrase|credentials?|api[-_]?key|[a-z0-9]+[-_]key)"
    r"(?![a-z0-9])"
)
_SECRET_NAME = re.compile(rf"(?<![a-z0-9]){_NAME}", re.IGNORECASE)
_ASSIGNMENT = re.compile(rf"((?<![a-z0-9]){_NAME}[\w-]*\s*[=:]\s*).+", re.IGNORECASE | re.DOTALL)
_QUOTED = re.compile(
    rf"((?<![a-z0-9]){_NAME}[\w-]*[\"']?\]?\s*[=:]\s*)([\"'])(?:(?!\2).)+\2", re.IGNORECASE
)


def is_secret_name(name: str) -> bool:
    """Whether a value with this name is a secret: ``api_key``, ``HF_TOKEN``, ``db.password``."""
    return bool(_SECRET_NAME.search(name))


def hide_assigned(text: str) -> str:
    """Replace by ``***`` what follows a secret name and ``=`` or ``:``, to the end of the text."""
    return _ASSIGNMENT.sub(rf"\1{HIDDEN}", text)


def hide_quoted(text: str) -> str:
    """Replace by ``***`` the texts in quotes that follow a secret name, as in a program."""
    return _QUOTED.sub(rf"\1\2{HIDDEN}\2", text)
