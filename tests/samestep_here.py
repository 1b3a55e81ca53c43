"""``samestep`` for the project of this clone, called from another folder."""

from samestep.cli import main

if __name__ == "__main__":
    main()
