"""Copies of a run elsewhere: in a store by a callback, or on each node that has its own disk."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import lightning as L

from samestep.ranks.meeting import is_shared
from samestep.run_spec import RunSpec

REPLICATION = "samestep.plugins.replication"
"""The plug-in for nodes that do not share the run directory; other runs import none of it."""


def fetch_newest(spec: RunSpec) -> None:
    """Let rank zero have the newest checkpoint of all nodes; every rank must call this."""
    if not is_shared(spec.run_dir):
        import_module(REPLICATION).fetch_newest(spec)


def replicate(run_dir: Path, names: Sequence[str]) -> None:
    """Give these checkpoints of rank zero to each node that lacks them; every rank must call this.

    Nothing happens where all nodes see one directory.
    """
    if not is_shared(run_dir):
        import_module(REPLICATION).replicate(run_dir, names)


class KeepsCopy(L.Callback):
    """A callback with a copy of the run; ``samestep.run.artifacts`` has the one in a store."""

    def fetch(self, run_dir: Path) -> None:
        """Bring the run to ``run_dir`` if its copy is newer; on rank zero, before it is opened.

        Raises:
            ConfigError: if to start without the copy could overwrite it.
        """

    def flush(self) -> None:
        """Complete the copy: all files of the run are written. Every rank calls this."""
