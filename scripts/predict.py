"""Name what is in image files, with the model of a run.

python scripts/predict.py runs/mine seven.png
python scripts/predict.py runs/mine photos/ --top 3 --format json
"""

from collections.abc import Sequence

import options

from samestep.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Print the most likely classes of each image.

    Returns:
        0, or 1 if a file could not be read.
    """
    parser = options.make_parser(__doc__)
    parser.add_argument("files", nargs="*", help="image files, and directories of them")
    parser.add_argument("--top", type=int, default=1, metavar="N", help="classes for each image")
    options.add_model_options(parser)
    parser.add_argument("--format", choices=["table", "json"], default="table")
    arguments = parser.parse(argv)
    if not arguments.files:
        raise ConfigError("there is nothing to predict; name image files, or directories of them")
    if arguments.top < 1:
        raise ConfigError(f"--top {arguments.top}: must be a whole number, at least 1")
    # This imports torch, which takes seconds: wrong usage is reported before.
    from project.predict import find_images, print_guesses
    from samestep.hydra.saved_run import move_to

    files = find_images(arguments.files)
    model, data = options.load(arguments)
    move_to(arguments.accelerator, model)
    return print_guesses(model, data, files, arguments.top, arguments.format == "json")


if __name__ == "__main__":
    options.run(main)
