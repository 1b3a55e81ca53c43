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
    # These import torch, which takes seconds: wrong usage is reported before.
    import torch

    from project.predict import find_images, print_guesses

    files = find_images(arguments.files)
    model, data = options.load(arguments)
    has_accelerator = torch.accelerator.is_available()
    if arguments.accelerator == "gpu" and not has_accelerator:
        raise ConfigError("--accelerator gpu: this machine has none; auto takes the CPU then")
    if arguments.accelerator != "cpu" and has_accelerator:
        model.to(torch.accelerator.current_accelerator())
    return print_guesses(model, data, files, arguments.top, arguments.format == "json")


if __name__ == "__main__":
    options.run(main)
