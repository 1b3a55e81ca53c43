"""Test or validate the model of a run again.

samestep evaluate runs/mine
samestep evaluate runs/mine --split val --ckpt last --format json
"""

import json
import math
import sys
from collections.abc import Sequence

from samestep.command_line import Parser


def main(argv: Sequence[str]) -> int:
    """Print the metrics of one split. Returns 0."""
    parser = Parser("samestep evaluate", __doc__)
    parser.add_run_dir()
    text = "part of the data; default: test, or val if the run has no test"
    parser.add_argument("--split", choices=["test", "val"], help=text)
    parser.add_ckpt()
    parser.add_accelerator()
    text = "of stdout; default: table"
    parser.add_argument("--format", choices=["table", "json"], default="table", help=text)
    parser.add_data()
    arguments = parser.parse(argv)
    # These imports take seconds: invalid arguments are reported before.
    from samestep.fit_checks import has_test
    from samestep.hydra import saved_run
    from samestep.loading import load_chosen

    model, data = load_chosen(arguments)
    split = arguments.split
    if split is None:
        split = "test" if has_test(model, data) else "val"
    metrics = saved_run.evaluate(model, data, arguments.run_dir, split, arguments.accelerator)
    unusable = [name for name, value in metrics.items() if not math.isfinite(value)]
    if unusable:
        print(f"warning: nan or infinite: {', '.join(unusable)}", file=sys.stderr)
    if arguments.format == "json":
        # JSON has no word for nan and infinity.
        print(json.dumps(metrics | dict.fromkeys(unusable), indent=2))
        return 0
    print(f"{arguments.run_dir}, {arguments.ckpt} checkpoint, {split}")
    width = max(map(len, metrics), default=0)
    for name, value in metrics.items():
        print(f"  {name:<{width}}  {value:.4f}")
    return 0
