"""The notes of a run that explain a difference, because they have announced it.

Add a line here with each note that a run prints before its first step to say what cannot be the
same. It must excuse as little as is true: the columns and the kinds of the first difference.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

INTERRUPTED = "interrupted"  # a run that was stopped or killed, against the undisturbed one
RANKS = "ranks"  # several ranks against one


class KnownNote(NamedTuple):
    """A note, and what it explains."""

    pattern: str
    """A regular expression for the line, whatever its letters."""
    columns: tuple[str, ...]
    """``INTERRUPTED``, ``RANKS`` or both."""
    kinds: tuple[str, ...]
    """Kinds of ``compare.Difference``; all if there are none."""
    meaning: str
    """For the table."""


LOADER = KnownNote(
    "from an ordinary DataLoader. Its batch_size counts samples per rank",
    (RANKS,), ("samples", "length"), "each rank has its own batches",
)  # fmt: skip
STREAM = KnownNote(
    "give one batch after the other, and no batch can be split",
    (RANKS,), ("samples", "length"), "each rank sees all of a stream",
)  # fmt: skip
RANDOM_TRANSFORMS = KnownNote(
    "draws random numbers for whole batches",
    (RANKS,), ("samples",), "each rank has its own random numbers",
)  # fmt: skip
WEIGHTS = ("parameter", "optimizer-state", "buffer", "metric")
"""Kinds of what follows from another step."""
LOSS = KnownNote(
    "the loss is not a mean over the samples",
    (RANKS,), WEIGHTS, "the loss is no mean over the samples",
)  # fmt: skip
RANDOM_STEPS = KnownNote(
    "each rank draws random numbers of its own in a training step",
    (RANKS,), WEIGHTS, "each rank draws its own random numbers",
)  # fmt: skip
RANDOM_TRANSFERS = KnownNote(
    "in a hook that moves the batch to the device",
    (RANKS,), ("samples",), "each rank draws its own random numbers for samples",
)  # fmt: skip
BATCH_NORM = KnownNote(
    "each slice of a batch by itself",
    (RANKS,), WEIGHTS, "each slice is normalized by itself",
)  # fmt: skip
LOST_ATTRIBUTES = KnownNote(
    "no checkpoint holds them",
    (INTERRUPTED,), (), "state outside the checkpoint is lost",
)  # fmt: skip
OTHER_BATCH = KnownNote(
    "is another one than it was before the interruption",
    (INTERRUPTED,), ("samples",), "what the data keep is in no checkpoint",
)  # fmt: skip
OTHER_STEP = KnownNote(
    "is repeated (on the same samples )?with",
    (INTERRUPTED,), (), "state outside the checkpoint is lost",
)  # fmt: skip
LOST_PARTS = KnownNote(
    "that cannot be restored in this program",
    (INTERRUPTED,), (), "parts that a restart does not have are lost",
)  # fmt: skip
OTHER_SUBSETS = KnownNote(
    "the training data are other samples than before the interruption",
    (INTERRUPTED,), ("samples",), "the script chooses its samples again in each start",
)  # fmt: skip

# The data first: with other samples all else differs too.
KNOWN_NOTES = (
    LOADER,
    STREAM,
    RANDOM_TRANSFORMS,
    RANDOM_TRANSFERS,
    LOSS,
    RANDOM_STEPS,
    BATCH_NORM,
    LOST_ATTRIBUTES,
    LOST_PARTS,
    OTHER_SUBSETS,
)

EFFECTS = OTHER_BATCH, OTHER_STEP
"""What a run says after it has continued, which excuses nothing."""


def find(
    said: str, column: str, kind: str, notes: Sequence[KnownNote] = KNOWN_NOTES
) -> tuple[KnownNote, str] | None:
    """The note that explains this kind of difference in this column, and the line that has it.

    Args:
        said: what the programs of a run have printed, each before its first step.
        column: ``INTERRUPTED`` or ``RANKS``.
        kind: of ``compare.Difference``.
        notes: among which to look.
    """
    for note in notes:
        # Both must fit: a note about the data of ranks excuses no other weights.
        explains = column in note.columns and (not note.kinds or kind in note.kinds)
        if not explains:
            continue
        for line in said.splitlines():
            # Not a name of a file or a metric that happens to contain the words.
            if "Note: " in line and re.search(note.pattern, line, re.I):
                return note, line
    return None
