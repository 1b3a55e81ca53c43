"""Hints such as ``did you mean model=mlp?`` for messages."""

import json
import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word or full key that was probably meant; None if none is similar."""
    # RUN_ID is typed like the environment variable, and the key is run_id.
    word = word.lower()
    last = _last_part(word)

    def similarity(key: str) -> float:
        # The last part of a key counts as much as the whole: `lr` means model.optimizer.lr.
        key_last = _last_part(key)
        whole = SequenceMatcher(None, word, key).ratio()
        parts = SequenceMatcher(None, last, key_last).ratio()
        return (last == key_last) + (whole + parts) / 2

    best = max(known, key=similarity, default="")
    return best if similarity(best) >= 0.6 else None


def _last_part(key: str) -> str:
    return re.split("[./]", key)[-1]


def did_you_mean(start: str, word: object, known: Iterable[str], before: str = "") -> str:
    """A hint such as ``did you mean model=mlp?``; empty if no known word is similar."""
    near = nearest(str(word), known)
    return f"{before}did you mean {start}{near}?" if near else ""


def no_such_choice(group: str, choice: object, choices: Sequence[str]) -> str:
    """The message for a choice that the group does not have."""
    hint = did_you_mean(f"{group}=", choice, choices, "; ") or ";"
    return f"{group}={show(choice)}: no such choice{hint} there is {', '.join(choices) or 'none'}"


def show(value: object) -> str:
    """The value as it is typed in an override."""
    return value if isinstance(value, str) else json.dumps(value)
