"""Name what is in image files; or continue a prompt, if the run has learned a text.

python scripts/predict.py runs/digits-cnn-3f2a1b seven.png
python scripts/predict.py runs/digits-cnn-3f2a1b photos/ --top 3 --format json
python scripts/predict.py runs/topics-transformer-3f2a1b --prompt "The " --length 200
"""

import argparse
from typing import Any

import options

from samestep.errors import ConfigError
from samestep.ranks import process


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = options.make_parser(__doc__)
    parser.add_argument("files", nargs="*", help="image files, and directories of them")
    parser.add_argument("--top", type=int, default=1, metavar="N", help="classes for each image")
    parser.add_argument("--prompt", metavar="TEXT", help="what a model of text continues")
    parser.add_argument("--length", type=int, default=500, metavar="N", help="characters to write")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="1: as learned")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the text")
    ckpts = "best, last, or one that was kept, such as epoch-0002"
    parser.add_argument("--ckpt", default="best", metavar="NAME", help=ckpts)
    parser.add_argument("--accelerator", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    return parser


def main(arguments: Any) -> int:
    """Print the most likely classes of each file, or the text that follows the prompt.

    Returns:
        0, or 1 if a file could not be read.
    """
    check_usage(arguments)
    import torch  # takes seconds: wrong usage is reported before

    from project.language.predict import continue_prompt
    from project.predict import find_images, print_guesses

    files = find_images(arguments.files)
    model, data = options.load(arguments)
    if arguments.accelerator == "gpu" and not torch.accelerator.is_available():
        raise ConfigError("--accelerator gpu: this machine has none; auto takes the CPU then")
    if arguments.accelerator != "cpu" and torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    if arguments.prompt is None:
        return print_guesses(model, data, files, arguments.top, arguments.format == "json")
    print(continue_prompt(model, data, arguments))
    return 0


def check_usage(arguments: Any) -> None:
    """Raise a ConfigError for wrong usage that argparse does not notice."""
    if not arguments.files and arguments.prompt is None:
        raise ConfigError(
            "there is nothing to predict; name image files, or directories of them, or give a "
            "model of text a --prompt"
        )
    if arguments.files and arguments.prompt is not None:
        raise ConfigError(f"{arguments.files[0]}: name files, or give a --prompt, but not both")
    if arguments.top < 1:
        raise ConfigError(f"--top {arguments.top}: must be a whole number, at least 1")


if __name__ == "__main__":
    process.run(lambda: options.run(main, options.parse(make_parser())))
