"""From a text to ids of its characters, and from ids to windows of equal length."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep import RunError

OTHER = 0  # the id of all characters that are not in the vocabulary
NO_TARGET = -100  # after the end of the text; cross_entropy ignores it


def read_text(file: str | None) -> str:
    """The text of a file in UTF-8; without a file, the help texts that this Python ships.

    Raises:
        RunError: if the file cannot be read, or is not in UTF-8.
    """
    if file is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name].strip("\n") for name in sorted(topics))
    try:
        return Path(file).read_text("utf-8")
    except OSError as error:
        raise RunError(f"data.file={file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RunError(f"data.file={file}: must be text in UTF-8: {error}") from error


def split(text: str, val_share: float, test_share: float) -> tuple[str, str, str]:
    """Cut a text into train, val and test, in this order: no character is in two of them."""
    end = len(text) - round(test_share * len(text))
    start = max(0, end - round(val_share * len(text)))
    return text[:start], text[start:end], text[end:]


class Vocabulary:
    """The most frequent characters of a text; ids from 1 on, in the order of their code points.

    The id 0 stands for all other characters.

    Args:
        characters: what the ids stand for, without repetition.
    """

    first = OTHER + 1  # the lowest id that may be sampled

    def __init__(self, characters: str) -> None:
        self.characters = self.content = "".join(sorted(characters))
        self.ids = {character: number for number, character in enumerate(self.characters, 1)}

    @classmethod
    def of_text(cls, text: str, size: int) -> "Vocabulary":
        """The ``size - 1`` most frequent characters."""
        counts = Counter(text)
        # Ties are broken by code point, so that the vocabulary is a function of the text alone.
        ordered = sorted(counts, key=lambda character: (-counts[character], character))
        return cls("".join(ordered[: size - 1]))

    def __len__(self) -> int:
        """Number of ids, including ``OTHER``."""
        return 1 + len(self.characters)

    def encode(self, text: str) -> Tensor:
        """Ids int64 ``[N]`` of the characters of a text."""
        return torch.tensor(
            [self.ids.get(character, OTHER) for character in text], dtype=torch.int64
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; the replacement character stands for ``OTHER``."""
        return "".join(f"\N{REPLACEMENT CHARACTER}{self.characters}"[i] for i in ids)


class Windows:
    """Windows of ``context`` characters, one every ``stride`` characters.

    A batch is ids of characters, int64 ``[B, T]``, and of those that follow, ``[B, T]``;
    ``NO_TARGET`` is after the end.

    Args:
        characters: ids of the whole text, integers ``[N]``, which may be a file.
        context: positions of a window, ``T``.
        stride: characters between the starts of two windows. If it equals ``context``, each
            character but the first is the target of exactly one position.
        with_rest: also give the windows that reach beyond the end of the text.
    """

    def __init__(self, characters: Any, context: int, stride: int, *, with_rest: bool) -> None:
        self.characters, self.context, self.stride = np.asarray(characters), context, stride
        num_targets = len(characters) - 1
        # Without the rest, a window begins where a whole one is left.
        num_starts = num_targets - 1 if with_rest else num_targets - context
        self.num_windows = max(0, num_starts // stride + 1)

    def __len__(self) -> int:
        return self.num_windows

    def __getitem__(self, ids: Tensor) -> list[Tensor]:
        positions = ids[:, None] * self.stride + torch.arange(self.context + 1)
        last = len(self.characters) - 1
        found = self.characters[positions.clamp(max=last).numpy()]
        chunks = torch.from_numpy(found.astype(np.int64))  # [B, T + 1]
        targets = chunks[:, 1:].masked_fill(positions[:, 1:] > last, NO_TARGET)
        return [chunks[:, :-1], targets]
