"""Compare runs as `samestep compare` does; the page of --html also has the changed predictions.

python scripts/compare.py runs/one runs/two --html compare.html
"""

from collections.abc import Sequence
from pathlib import Path

import options

from samestep.report import commands
from samestep.report.compare import Gallery


def main(argv: Sequence[str]) -> int:
    """Print the comparison, and write the page."""
    return commands.compare(argv, draw)


def draw(run_dirs: Sequence[Path]) -> list[Gallery]:
    """The test images that the runs guess differently."""
    from project.predicted import galleries  # imports torch, which takes seconds

    return galleries(run_dirs)


if __name__ == "__main__":
    options.run(main)
