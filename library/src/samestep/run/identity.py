"""Which run a checkpoint belongs to: its name, and a digest of its configuration.

Each start writes both into ``run.json``, and each checkpoint carries both.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from samestep.run import record


class Identity(NamedTuple):
    """What a run is recognized by."""

    run_id: str | None = None  # None: not known
    configs: tuple[str, ...] = ()  # digests of the configurations of its starts, the newest last

    def problem_with(self, content: Mapping[str, Any]) -> str | None:
        """Why a checkpoint with this ``run_id`` and ``config`` is not ours; None if it is."""
        run_id, config = content.get("run_id"), content.get("config")
        if self.run_id and run_id and run_id != self.run_id:
            return (
                f"it belongs to the run {run_id}, and this run is {self.run_id}; to continue that "
                f"one, give its directory its own name again and set RUN_ID={run_id}"
            )
        if self.configs and config and config not in self.configs:
            return "it belongs to a run with another configuration"
        return None


def read_identity(run_dir: Path) -> Identity:
    """The identity that the starts of a run have recorded; an empty one where there is none."""
    known = record.read(run_dir)
    configs = tuple(str(start["config"]) for start in known.starts if "config" in start)
    return Identity(known.run_id, configs)


def digest_of(values: Mapping[str, Any]) -> str:
    """A digest of a flat configuration."""
    text = json.dumps(dict(values), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
