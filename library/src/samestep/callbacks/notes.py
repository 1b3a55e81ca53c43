"""What the callbacks tell the person who trains: once, and not once per rank."""

from collections.abc import Sequence

import lightning as L

from samestep.ranks import output

MAX_NAMES = 8  # in a note


def print_note(trainer: L.Trainer, note: str) -> None:
    """Print a note on rank zero."""
    if trainer.is_global_zero:
        output.say(note)


def join_names(names: Sequence[str]) -> str:
    """The names in a sentence."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
