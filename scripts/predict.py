# copier: set pictures = "(?m)^.*(photos|seven).*\n"
# copier: filter regex_replace(pictures if "images" not in tasks else "(?!)", "")
# copier: filter regex_replace("(?m)^.*--prompt.*\n" if "language" not in tasks else "(?!)", "")
"""Ask the model of a run about something new.

python scripts/predict.py runs/mine seven.png                            # what is in image files
python scripts/predict.py runs/mine photos/ --top 3 --format json
python scripts/predict.py runs/book --prompt "The " --length 200         # how a text goes on
"""

# copier: endfilter
# copier: endfilter
import argparse
from typing import Any

import options

from samestep.errors import ConfigError
from samestep.ranks import process


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = options.make_parser(__doc__)
    # copier: if "images" in tasks
    parser.add_argument("files", nargs="*", help="image files, and directories of them")
    parser.add_argument("--top", type=int, default=1, metavar="N", help="classes for each image")
    # copier: endif
    # copier: if "language" in tasks
    parser.add_argument("--prompt", metavar="TEXT", help="what a model of text continues")
    parser.add_argument("--length", type=int, default=500, metavar="N", help="characters to write")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="1: as learned")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the text")
    # copier: endif
    ckpts = "best, last, or one that was kept, such as epoch-0002"
    parser.add_argument("--ckpt", default="best", metavar="NAME", help=ckpts)
    parser.add_argument("--accelerator", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    return parser


def main(arguments: Any) -> int:
    """Print what the model says.

    Returns:
        0, or 1 if a file could not be read.
    """
    check_usage(arguments)
    import torch  # takes seconds: wrong usage is reported before

    # copier: if "images" in tasks
    from project.predict import find_images, print_guesses

    files = find_images(arguments.files)
    # copier: endif
    model, data = options.load(arguments)
    if arguments.accelerator == "gpu" and not torch.accelerator.is_available():
        raise ConfigError("--accelerator gpu: this machine has none; auto takes the CPU then")
    if arguments.accelerator != "cpu" and torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    # copier: if "images" in tasks
    if arguments.files:
        return print_guesses(model, data, files, arguments.top, arguments.format == "json")
    # copier: endif
    # copier: if "language" in tasks
    from project.language.predict import continue_prompt

    print(continue_prompt(model, data, arguments))
    # copier: endif
    return 0


def check_usage(arguments: Any) -> None:
    """Raise a ConfigError for wrong usage that argparse does not notice."""
    # copier: if "images" in tasks
    if arguments.top < 1:
        raise ConfigError(f"--top {arguments.top}: must be a whole number, at least 1")
    # copier: endif
    files, prompt = getattr(arguments, "files", []), getattr(arguments, "prompt", None)
    if not files and prompt is None:
        raise ConfigError("there is nothing to predict; --help says what to name")
    if files and prompt is not None:
        raise ConfigError(f"{files[0]}: name files, or give a --prompt, but not both")


if __name__ == "__main__":
    process.run(lambda: options.run(main, options.parse(make_parser())))
