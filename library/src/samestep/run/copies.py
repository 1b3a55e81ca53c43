"""What a run asks of a callback that keeps a copy of it elsewhere, whatever the place is."""

from pathlib import Path

import lightning as L


class KeepsCopy(L.Callback):
    """A callback with a copy of the run; ``samestep.run.artifacts`` has the one in a store."""

    def fetch(self, run_dir: Path) -> None:
        """Bring the run to ``run_dir`` if its copy is newer; on rank zero, before it is opened.

        Raises:
            ConfigError: if to start without the copy could overwrite it.
        """

    def flush(self) -> None:
        """Complete the copy: all files of the run are written. Every rank calls this."""
