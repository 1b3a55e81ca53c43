"""Which keys of a configuration may have another value: one table for all who compare values."""

import re
from collections.abc import Sequence
from enum import IntEnum


class Nature(IntEnum):
    """What a key is about. Each nature allows what those before it allow, and more."""

    LEARNED = 0
    """What is learned: the same in each start of a run. So is every key that is not in the table.
    """
    LIMIT = 1
    """How far the ranks go, and how they go together: may change when a run continues, on all nodes
    at once."""
    PLACE = 2
    """Where a run takes place: each node may have its own."""
    LOOKS = 3
    """Names, places of files, and what is shown: no difference between two runs."""


TABLE = {
    Nature.LIMIT: (
        r"trainer\.(max_(epochs|steps|time)|strategy(\..+)?|log_every_n_steps"
        r"|num_sanity_val_steps|limit_predict_batches|detect_anomaly|benchmark|inference_mode)",
        r"callbacks\.\w+\.patience",
    ),
    Nature.PLACE: (
        r"(cluster|local|callbacks\.artifacts)(\..+)?",
        r"trainer\.(devices|num_nodes|accelerator|profiler(\..+)?)",
        r"callbacks\.\w+\.(every_\w+|max_skipped)",
    ),
    Nature.LOOKS: (
        r"(.+\.)?(run_id|run_dir|dirpath)|run_root|rules|report|allow_changes|notes|tags",
        r"(choices|summary|logger|callbacks\.progress)(\..+)?",
        r"trainer\.enable_\w+",
    ),
}
"""Patterns of full keys, as Hydra and ``samestep.Trainer`` name them."""
PATTERNS = {nature: re.compile("|".join(patterns)) for nature, patterns in TABLE.items()}


def nature_of(key: str, may_change: Sequence[str] = ()) -> Nature:
    """What the full key is about.

    Args:
        key: such as ``trainer.max_epochs``.
        may_change: patterns of the user's own keys that do not change what is learned.
    """
    # Of several the last: `callbacks.artifacts.run_dir` is the place of a file, not one of a rank.
    found = [nature for nature, pattern in PATTERNS.items() if pattern.fullmatch(key)]
    own = any(re.fullmatch(pattern, key) for pattern in may_change)
    return max(found, default=Nature.PLACE if own else Nature.LEARNED)
