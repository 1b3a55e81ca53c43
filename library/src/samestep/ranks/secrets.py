"""Secrets are never printed or saved: they are found by name, value or form and become ``***``."""

import re
from typing import Any

from samestep.ranks import environment

HIDDEN = "***"
MIN_LENGTH = 8  # a shorter value of a variable would also hide ordinary words
RANDOM_LENGTH = 12  # with numerals or mixed case it is no word, and hidden within words too

# Words in names such as HF_TOKEN, aws_secret_access_key, db.password, OPENAI_APIKEY. A single "key"
# is no secret, because tolerations of Kubernetes have keys; "tokens" are words of a text.
_NAME = (
    r"(?:token|secret|passw(?:or)?d|passphrase|credentials?|api[-_]?key|[a-z0-9]+[-_]key)"
    r"(?![a-z0-9])"
)
_SECRET_NAME = re.compile(rf"(?<![a-z0-9]){_NAME}", re.IGNORECASE)
_ASSIGNMENT = re.compile(rf"((?<![a-z0-9]){_NAME}[\w-]*\s*[=:]\s*).+", re.IGNORECASE | re.DOTALL)
_QUOTED = re.compile(
    rf"((?<![a-z0-9]){_NAME}[\w-]*[\"']?\]?\s*[=:]\s*)([\"'])(?:(?!\2).)+\2", re.IGNORECASE
)
# For variables any part of a word counts (PGPASSWORD): hiding one value too many does no harm.
_SECRET_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)(?!git@)[^/\s'\"]+(?=@)")  # user:password in an address
_KEY = re.compile(  # keys and tokens as AWS, GitHub, GitLab, Hugging Face, OpenAI... make them
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bgh[pousr]_\w{30,}|\bgithub_pat_\w{30,}|\bglpat-[\w-]{20,}"
    r"|\bhf_[A-Za-z0-9]{30,}|\bsk-[\w-]{20,}|\bxox[abprs]-[\w-]{10,}|\bAIza[\w-]{35}"
    r"|\bwandb_v\d_\w{20,}|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY(?:.*?-----END [A-Z ]*PRIVATE KEY-----|.*)",
    re.DOTALL,
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


def looks_secret(value: str) -> bool:
    """Whether a text holds a secret, whatever its name is."""
    return redact(value) != value


def redact(text: str) -> str:
    """Replace each secret in ``text`` by ``***``.

    Secrets are the values of secret environment variables, logins in addresses
    (``://user:password@host``), and keys in the form of a known service. MY_TOKEN=validation hides
    ``validation``, but not a part of ``validation/loss``.
    """
    # A secret may be a part of another one, so the longest is replaced first.
    for value in sorted(find_values(text), key=len, reverse=True):
        if is_random(value):
            text = text.replace(value, HIDDEN)
        else:
            text = re.sub(rf"(?<![\w/.-]){re.escape(value)}(?![\w/-]|\.\w)", HIDDEN, text)
    return _KEY.sub(HIDDEN, _LOGIN.sub(HIDDEN, text))


def find_values(text: str) -> set[str]:
    """Find the values of secret environment variables that are in ``text``."""
    # Most texts are words of a configuration, too short for a secret. Then there is no need to copy
    # the variables.
    if len(text) < MIN_LENGTH:
        return set()
    found = set()
    for name, value in environment.variables().items():
        is_in_text = len(value) >= MIN_LENGTH and value in text
        if is_in_text and _SECRET_VARIABLE.search(name):
            found.add(value)
    return found


def is_random(value: str) -> bool:
    """Whether a value cannot be an ordinary word, so that it is hidden within words too."""
    if len(value) < RANDOM_LENGTH:
        return False
    is_mixed = value not in (value.lower(), value.upper())
    return is_mixed or re.search(r"\d", value) is not None


def redact_argument(argument: str) -> str:
    """Redact an argument of a command line: also the value of ``logger.wandb.api_key=...``."""
    return redact(hide_assigned(argument))


def redact_values(value: Any, *, is_secret: bool = False) -> Any:
    """Copy plain containers with each secret text replaced, also those below a secret key."""
    if isinstance(value, dict):
        copy = {}
        for key, item in value.items():
            # A mapping below a secret key may have harmless names: credentials: {first: ...}.
            is_below = is_secret or is_secret_name(str(key))
            copy[key] = redact_values(item, is_secret=is_below)
        return copy
    if isinstance(value, list):
        return [redact_values(item, is_secret=is_secret) for item in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if is_secret else redact(value)
