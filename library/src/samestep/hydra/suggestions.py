"""Hints such as ``did you mean model=mlp?`` for messages."""

import json
import re
from collections.abc import Container, Iterable, Sequence
from difflib import SequenceMatcher

OTHER_NAMES = {
    "batch_size": "data.global_batch_size",
    "train_batch_size": "data.global_batch_size",
    "val_batch_size": "data.eval_batch_size",
    "test_batch_size": "data.eval_batch_size",
    "data_dir": "data.root",
    "gpus": "trainer.devices",
    "num_gpus": "trainer.devices",
    "nproc_per_node": "trainer.devices",
    "nnodes": "trainer.num_nodes",
    "num_epochs": "trainer.max_epochs",
    "learning_rate": "model.optimizer.lr",
    "optimizer.name": "model/optimizer",
    "scheduler.name": "model/lr_scheduler",
    "task_name": "run_id",
    "run_name": "run_id",
    "experiment_name": "run_id",
}
"""Keys of other projects, by their last parts, and their keys here."""


def find_other_name(key: str, known: Container[str]) -> str | None:
    """The known key for what other projects call ``key``; None if there is none."""
    parts = key.lower().split(".")
    for start in range(len(parts)):
        other = OTHER_NAMES.get(".".join(parts[start:]))
        if other in known:
            return other
    return None


def is_probably(word: str, key: str) -> bool:
    """Whether ``word`` may be a typo or a part of the name ``key``, and not another name.

    ``hidden_size`` is no typo of ``block_size``, although half of their letters are the same.
    """
    typed, known = _last_part(word.lower()).split("_"), _last_part(key.lower()).split("_")
    only_typed = without(typed, known)
    only_known = without(known, typed)
    # One has all words of the other: epochs, max_epochs.
    if not only_typed or not only_known:
        return True
    of_different = _similarity("".join(only_typed), "".join(only_known))
    # Of a short word with a typo little is left: rnu_id, run_id.
    of_whole = _similarity("".join(typed), "".join(known))
    return of_different >= 0.75 or of_whole >= 0.8


def without(parts: Iterable[str], others: Container[str]) -> list[str]:
    """The parts that are none of the others, in their order."""
    return [part for part in parts if part not in others]


def _similarity(first: str, second: str) -> float:
    return SequenceMatcher(None, first, second).ratio()


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word or full key that was probably meant; None if none is similar."""
    # RUN_ID is typed like the environment variable, and the key is run_id.
    word = word.lower()
    last = _last_part(word)

    def similarity(key: str) -> float:
        # The last part of a key counts as much as the whole: `lr` means model.optimizer.lr.
        key_last = _last_part(key)
        of_names = _similarity(word, key) + _similarity(last, key_last)
        return (last == key_last) + of_names / 2

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
    start = f"{group}={show(choice)}: no such choice"
    if not choices:
        return f"{start}; there is no file in configs/{group}"
    hint = did_you_mean(f"{group}=", choice, choices, "; ") or ";"
    return f"{start}{hint} there is {', '.join(choices)}"


def show(value: object) -> str:
    """The value as it is typed in an override."""
    return value if isinstance(value, str) else json.dumps(value)
