"""Completion by the Tab key: samestep completion bash.

Prints a script for bash, zsh or fish, which completes train.py and samestep in the folder of a
project. To have it in each new shell:

  echo 'source <(samestep completion bash)' >> ~/.bashrc
  echo 'source <(samestep completion zsh)' >> ~/.zshrc     # after compinit
  echo 'samestep completion fish | source' >> ~/.config/fish/config.fish

Activate the environment before, or write the path of samestep in it.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from samestep.command_line import Parser

SHELLS = ("bash", "zsh", "fish")


def main(argv: Sequence[str]) -> int:
    """Print the script for one shell."""
    parser = Parser("samestep completion", __doc__)
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
    shell = parser.parse(argv).shell
    folder = Path(__file__).parent
    path = shlex.quote(str(folder / "words.sh"))
    print(f"set -g _samestep_words {path}" if shell == "fish" else f"_samestep_words={path}")
    print((folder / shell).read_text(), end="")
    return 0
