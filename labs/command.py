"""What the commands of the laboratories share: their help, and the choice of experiments."""

import argparse
from collections.abc import Sequence


def make_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser for ``python -m labs.<name>``, whose help is the docstring of its module."""
    return argparse.ArgumentParser(
        prog=f"python -m labs.{name}", description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip


def is_chosen(name: str, texts: Sequence[str]) -> bool:
    """Whether the name of an experiment has one of these texts in it; without texts all are."""
    return not texts or any(text in name for text in texts)
