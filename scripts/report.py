"""Write report.html, one page with all that is known of a run. The run may still be training.

python scripts/report.py runs/mine
python scripts/report.py runs/mine --output mine.html
"""

from pathlib import Path
from typing import Any

import options

from samestep.ranks import process


def main(arguments: Any) -> int:
    """Write the page, and print where it is."""
    from samestep.report import page  # imports matplotlib

    print(page.write(arguments.run_dir, arguments.output))
    return 0


if __name__ == "__main__":
    parser = options.make_parser(__doc__)
    place = "where to write, if not to report.html in the directory of the run"
    parser.add_argument("--output", type=Path, metavar="FILE", help=place)
    process.run(lambda: options.run(main, options.parse(parser)))
