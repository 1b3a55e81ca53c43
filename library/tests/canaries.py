"""What the source of another library must still say, where we rely on it; what a version lacks."""

import inspect
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch import callbacks

LOCK = Path(__file__).parents[2] / "requirements.lock"
needs_averaging = pytest.mark.skipif(
    not hasattr(callbacks, "WeightAveraging"), reason="Lightning 2.5 has no WeightAveraging"
)
needs_locked_lightning = pytest.mark.skipif(
    f"\nlightning=={L.__version__} " not in LOCK.read_text(), reason="of the version that is locked"
)

Sources = list[tuple[Any, list[str]]]
"""Functions, classes or modules, each with texts that stand in its source in this order."""


def check_sources(sources: Sources) -> None:
    for source, texts in sources:
        code, place = inspect.getsource(source), 0
        for text in texts:
            place = code.find(text, place)
            assert place >= 0, text
