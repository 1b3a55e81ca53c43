"""Bound the starts of a run on a cluster that bring it no further.

A cluster replaces a pod that was evicted, or that has saved and stopped, and counts neither. If the
cause stays, such as a disk that this very run fills, that would go on forever.
"""

import json
from contextlib import suppress
from pathlib import Path

from samestep.errors import ConfigError
from samestep.run import lock, manifest, record
from samestep.run.files import read_json, write_text
from samestep.run.layout import LAST

FILE = ".starts"


def reject_endless(run_dir: Path, limit: int) -> None:
    """Count a start of the run, before anything is trained; the next checkpoint ends the count.

    Raises:
        ConfigError: after more than ``limit`` starts in a row without a new checkpoint. The count
            then begins again: whoever launches the run once more has mended the cause.
    """
    # A run that has written nothing yet cannot be counted: its folder must stay new. And where
    # another node trains, the run goes on.
    if not (run_dir / record.FILE).exists() or lock.is_held(run_dir):
        return
    newest = manifest.read(run_dir / LAST)
    checkpoint = newest.sha256 if newest else ""
    noted = read_json(run_dir / FILE) or {}
    starts = 1
    if noted.get("checkpoint") == checkpoint:
        starts += int(noted.get("starts", 0))
    is_endless = starts > limit + 1
    # On a full disk the run itself says what is wrong.
    with suppress(OSError):
        if is_endless:
            (run_dir / FILE).unlink()
        else:
            write_text(run_dir / FILE, json.dumps({"checkpoint": checkpoint, "starts": starts}))
    if is_endless:
        raise ConfigError(
            f"{run_dir}: {starts - 1} starts in a row have saved no new checkpoint "
            f"(cluster.backoff_limit={limit}): the pods are evicted or stopped too early; samestep "
            "status says why; mend that, and launch the run again"
        )
