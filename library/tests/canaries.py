"""What the source of another library must still say, where we rely on it."""

import inspect
from typing import Any

Sources = list[tuple[Any, list[str]]]
"""Functions, classes or modules, each with texts that stand in its source in this order."""


def check_sources(sources: Sources) -> None:
    for source, texts in sources:
        code, place = inspect.getsource(source), 0
        for text in texts:
            place = code.find(text, place)
            assert place >= 0, text
