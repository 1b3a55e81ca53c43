"""``samestep`` of this clone, called from another folder; it need not be installed."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # The folder of this script has another `samestep`, which is tests.
    sys.path[0] = str(Path(__file__).absolute().parents[1] / "library/src")
    from samestep.cli import main

    main()
