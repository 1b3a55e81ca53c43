"""Test or validate the model of a run again.

python scripts/evaluate.py runs/mine
python scripts/evaluate.py runs/mine --split val --ckpt last --format json
"""

import json
import math
import sys
from collections.abc import Sequence

import options


def main(argv: Sequence[str]) -> int:
    """Print the metrics of one split. Returns 0."""
    parser = options.make_parser(__doc__)
    text = "default: test, or val if the run has no test"
    parser.add_argument("--split", choices=["test", "val"], help=text)
    options.add_model_options(parser)
    parser.add_argument("--format", choices=["table", "json"], default="table")
    options.add_data_options(parser)
    arguments = parser.parse(argv)
    # These imports take seconds: wrong usage is reported before.
    from samestep.hydra.build import has_test
    from samestep.hydra.saved_run import evaluate

    model, data = options.load(arguments)
    split = arguments.split or ("test" if has_test(model, data) else "val")
    metrics = evaluate(model, data, arguments.run_dir, split, arguments.accelerator)
    if unusable := [name for name, value in metrics.items() if not math.isfinite(value)]:
        print(f"warning: nan or infinite: {', '.join(unusable)}", file=sys.stderr)
    if arguments.format == "json":
        # JSON has no word for nan and infinity.
        print(json.dumps({k: None if k in unusable else v for k, v in metrics.items()}, indent=2))
        return 0
    print(f"{arguments.run_dir}, {arguments.ckpt} checkpoint, {split}")
    width = max(map(len, metrics), default=0)
    for name, value in metrics.items():
        print(f"  {name:<{width}}  {value:.4f}")
    return 0


if __name__ == "__main__":
    options.run(main)
