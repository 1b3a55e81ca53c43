"""Continue a prompt with the language model of a run.

python scripts/write_text.py runs/book --prompt "The "
python scripts/write_text.py runs/book --prompt "The " --length 200 --temperature 0.5
"""

from collections.abc import Sequence

import options


def main(argv: Sequence[str]) -> int:
    """Print the prompt, and what the model writes after it. Returns 0."""
    parser = options.make_parser(__doc__)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what the model continues")
    parser.add_argument("--length", type=int, default=500, metavar="N", help="characters to write")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T",
        help="1 draws from what was learned; less prefers likely characters",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of what is drawn")
    options.add_model_options(parser)
    parser.add_argument("--format", choices=["text", "json"], default="text")
    arguments = parser.parse(argv)
    # These import torch, which takes seconds: wrong usage is reported before.
    from project.language.write import continue_prompt
    from project.saved_run import move_to

    model, data = options.load(arguments)
    move_to(arguments.accelerator, model)
    print(continue_prompt(model, data, arguments))
    return 0


if __name__ == "__main__":
    options.run(main)
