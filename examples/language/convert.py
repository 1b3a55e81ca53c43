"""Convert text into a file of tokens, for experiment=language data=tokens.

python -m examples.language.convert book.txt data/book.tokens    # bytes of UTF-8
python -m examples.language.convert books data/books.tokens --tokenizer tokenizer.json    # of *.txt

The same command resumes a conversion that was stopped, and verifies one that is complete. A
tokenizer needs the package tokenizers; "<|endoftext|>" of GPT-2 is an example for --end.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from samestep import Parser, run_script


def main(argv: Sequence[str]) -> int:
    """Write the tokens, and print how a run reads them. Returns 0."""
    parser = Parser("python -m examples.language.convert", __doc__)
    parser.add_argument("source", type=Path, help="a text file in UTF-8, or a folder of *.txt")
    parser.add_argument("target", type=Path, help="file of tokens, such as data/books.tokens")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json")
    parser.add_argument("--end", metavar="TOKEN", help="its token for the end of a text")
    chosen = parser.parse(argv)
    # This import takes seconds: invalid arguments are reported before.
    from examples.language.tokens import convert, read_tokenizer

    tokenizer = read_tokenizer(chosen.tokenizer, chosen.end)
    screen = Console(stderr=True)
    with Progress(console=screen, disable=not screen.is_terminal) as progress:
        bar = progress.add_task(str(chosen.target))
        show = partial(progress.update, bar)
        facts = convert(chosen.source, chosen.target, tokenizer, show)
    print(f"{chosen.target}: {facts['num_tokens']} tokens, read back and compared. To train:")
    words = f"data.file={chosen.target} data.vocabulary_size={facts['vocabulary_size']}"
    print(f"  python train.py experiment=language data=tokens {words}")
    return 0


if __name__ == "__main__":
    run_script(main)
