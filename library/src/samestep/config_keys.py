"""Which keys of a configuration may have another value: one table for all who compare values."""

import re
from enum import IntEnum


class KeyScope(IntEnum):
    """What a key is about. Each scope allows what those before it allow, and more."""

    EXPERIMENT = 0
    """What is learned: the same in each start of a run. Keys without a pattern belong here."""
    LIMIT = 1
    """How far the ranks go, and how they go together: may change when a run continues, on all nodes
    at once."""
    PER_NODE = 2
    """Where a run takes place: each node may have its own."""
    COSMETIC = 3
    """Names, paths and display options, which do not make two runs different."""


TABLE = {
    KeyScope.LIMIT: (
        r"trainer\.((max_(epochs|steps|time)|strategy)(\..+)?|log_every_n_steps"
        r"|num_sanity_val_steps|limit_predict_batches|detect_anomaly|benchmark|inference_mode)",
        r"callbacks\.\w+\.patience",
    ),
    KeyScope.PER_NODE: (
        r"(cluster|local|callbacks\.artifacts)(\..+)?",
        r"trainer\.(devices|num_nodes|accelerator|(notice|profiler)(\..+)?)",
        r"callbacks\.\w+\.(every_\w+|max_skipped)",
        # Where data lie and who reads them. What is read is compared by its effect.
        r"data\.(root|file|download|mirror|num_(workers|threads)|storage_options(\..+)?|version)",
        r"model\.compile",
    ),
    KeyScope.COSMETIC: (
        r"(.+\.)?(run_id|run_dir|dirpath)|run_root|rules|report|allow_changes|notes|tags",
        r"(choices|summary|logger|callbacks\.progress)(\..+)?",
        r"trainer\.(allow|enable_\w+)",
    ),
}
"""Patterns of full keys, as Hydra and ``samestep.Trainer`` name them."""
PATTERNS = {scope: re.compile("|".join(patterns)) for scope, patterns in TABLE.items()}


def scope_of(key: str) -> KeyScope:
    """What the full key, such as ``trainer.max_epochs``, is about."""
    found = KeyScope.EXPERIMENT
    # If several match, the loosest wins: `callbacks.artifacts.run_dir` is a path, not a setting of
    # a node.
    for scope, pattern in PATTERNS.items():
        if pattern.fullmatch(key):
            found = scope
    return found
