"""Name what is in image files, or in all images of directories.

python scripts/predict.py runs/digits-cnn-3f2a1b seven.png
python scripts/predict.py runs/digits-cnn-3f2a1b photos/ --top 3 --format json
"""

import argparse
import sys
from typing import Any

import options

from samestep.errors import ConfigError
from samestep.ranks import process


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = options.make_parser(__doc__)
    parser.add_argument("files", nargs="*", help="image files, and directories of them")
    parser.add_argument("--top", type=int, default=1, metavar="N", help="classes for each image")
    parser.add_argument("--ckpt", choices=["best", "last"], default="best")
    parser.add_argument("--accelerator", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    return parser


def main(arguments: Any) -> int:
    """Print the most likely classes of each file.

    Returns:
        0, or 1 if a file could not be read. It is named on stderr, and the others are predicted.
    """
    check_usage(arguments)
    import torch  # takes seconds: wrong usage is reported before

    from project.predict import find_images, predict_files, to_json, to_table

    files = find_images(arguments.files)
    model, data = options.load(arguments)
    top, num_classes = arguments.top, model.num_classes
    if top > num_classes:
        raise ConfigError(f"--top {top}: must not exceed the {num_classes} classes of the run")
    if arguments.accelerator == "gpu" and not torch.accelerator.is_available():
        raise ConfigError("--accelerator gpu: this machine has none; auto takes the CPU then")
    if arguments.accelerator != "cpu" and torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())

    guesses, errors = {}, 0
    for file, result in predict_files(model, data, files):
        if isinstance(result, Exception):
            print(f"error: {result}", file=sys.stderr)
            errors += 1
        else:
            guesses[str(file)] = result[:top]
    print(to_json(guesses) if arguments.format == "json" else to_table(guesses, top))
    return 1 if errors else 0


def check_usage(arguments: Any) -> None:
    """Raise a ConfigError for wrong usage that argparse does not notice."""
    if not arguments.files:
        raise ConfigError("there is nothing to predict; name image files, or directories of them")
    if arguments.top < 1:
        raise ConfigError(f"--top {arguments.top}: must be a whole number, at least 1")


if __name__ == "__main__":
    process.run(lambda: options.run(main, options.parse(make_parser())))
