"""The files of a run directory, by their paths in it.

runs/<run_id>/
    config.yaml        the whole configuration, resolved, without secrets
    run.json           state, starts and ends
    metrics.json       the final metrics
    metrics.csv        the metrics over time
    receipts.bin       what each batch has left, to compare it if it is repeated
    time.bin           where the time of the newest start went, so far
    checkpoints/       best.ckpt to test, last.ckpt to resume from, epoch-0002.ckpt and so on to
                       keep
    predictions/       tables and pictures of test results
    logs/              git.diff, rank-<n>.log
    report.html        all of this on one page
"""

from pathlib import Path

BEST, LAST = "checkpoints/best.ckpt", "checkpoints/last.ckpt"
IDENTITY = ("config.yaml", "run.json")  # without them a checkpoint cannot be resumed from
RECORDS = (*IDENTITY, "metrics.csv")  # what a copy of the run needs beside its checkpoints
TIME = "time.bin"


def shorten(path: Path) -> Path:
    """A path as it is typed in the current directory: relative, if it is below that directory."""
    if path.is_relative_to(Path.cwd()):
        return path.relative_to(Path.cwd())
    return path
