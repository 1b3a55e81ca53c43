"""``samestep`` for the project of this clone, called from another folder."""

import sys

if __name__ == "__main__":
    del sys.path[0]  # its `samestep` is a folder of tests
    from samestep.cli import main

    main()
