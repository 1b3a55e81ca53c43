"""Secrets are never printed or saved: they are found by name, value or form and become ``***``."""

import re
from collections.abc import Sequence
from typing import Any

from samestep.ranks import environment
from samestep.ranks.secret_names import HIDDEN, hide_assigned, is_secret_name

MIN_LENGTH = 8  # a shorter value of a variable would also hide ordinary words
RANDOM_LENGTH = 12  # with numerals or mixed case it is no word, and hidden within words too

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


def looks_secret(value: str) -> bool:
    """Whether a text holds a secret, whatever its name is."""
    return redact(value) != value


def redact(text: str) -> str:
    """Replace each secret in ``text`` by ``***``.

    Secrets are the values of secret environment variables, logins in addresses
    (``://user:password@host``), and keys in the form of a known service.
    """
    return _hide(text, _find_secret_values())


def _find_secret_values() -> list[str]:
    """The values of secret environment variables, the longest first."""
    values = {
        value
        for name, value in environment.variables().items()
        if _SECRET_VARIABLE.search(name) and len(value) >= MIN_LENGTH
    }
    # A secret may be a part of another one, so the longest is replaced first.
    return sorted(values, key=len, reverse=True)


def _hide(text: str, values: Sequence[str]) -> str:
    """Replace each of the values, and what looks like a secret.

    MY_TOKEN=validation hides ``validation``, but not a part of ``validation/loss``.
    """
    for value in values:
        if value not in text:
            continue
        is_mixed = value != value.lower() and value != value.upper()
        if len(value) >= RANDOM_LENGTH and (is_mixed or re.search(r"\d", value)):
            text = text.replace(value, HIDDEN)
        else:
            text = re.sub(rf"(?<![\w/.-]){re.escape(value)}(?![\w/-]|\.\w)", HIDDEN, text)
    return _KEY.sub(HIDDEN, _LOGIN.sub(HIDDEN, text))


def redact_argument(argument: str) -> str:
    """Redact an argument of a command line: also the value of ``logger.wandb.api_key=...``."""
    return redact(hide_assigned(argument))


def redact_values(value: Any) -> Any:
    """Copy plain containers with each secret text replaced, also those with a secret key.

    Args:
        value: dictionaries, lists, texts, numbers.
    """
    return _redact_values(value, _find_secret_values(), is_secret=False)


def _redact_values(value: Any, values: Sequence[str], *, is_secret: bool) -> Any:
    if isinstance(value, dict):
        return {
            key: _redact_values(item, values, is_secret=is_secret or is_secret_name(str(key)))
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_redact_values(item, values, is_secret=is_secret) for item in value]
    if isinstance(value, str):
        return HIDDEN if is_secret else _hide(value, values)
    return value
