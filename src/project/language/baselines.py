"""What counting alone achieves: bits per character of n-grams, on the same split as a run's.

    python -m project.language.baselines
    python -m project.language.baselines data.file=book.txt

The probability of a character after the ``n - 1`` characters before it is that of Witten and Bell:
what was counted in the training text, interpolated with the probability of the next shorter n-gram.
The shortest one is interpolated with an equal probability for each id. There is nothing to tune.

Source: Chen and Goodman, section 2.5, https://dash.harvard.edu/handle/1/25104739
"""

import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def bits_per_character(train: Tensor, test: Tensor, order: int, num_ids: int) -> float:
    """Mean bits that an n-gram model needs for each character of ``test`` but the first.

    Args:
        train: ids of the training text, int64 ``[N]``, from 0 to ``num_ids - 1``.
        test: ids of the test text, int64 ``[M]``.
        order: ``n``; 1 counts single characters, 5 looks back at four.
        num_ids: number of ids.
    """
    probabilities = np.full(len(test) - 1, 1 / num_ids)
    for length in range(1, order + 1):
        # A character near the start has fewer characters before it: it keeps the shorter n-gram.
        seen = slice(max(0, length - 2), None)
        probabilities[seen] = interpolate(
            train.numpy(), test.numpy(), length, num_ids, probabilities[seen]
        )
    return float(-np.log2(probabilities).mean())


def interpolate(train: Ints, test: Ints, length: int, num_ids: int, shorter: Floats) -> Floats:
    """Probabilities by n-grams of one length, from those of the next shorter one.

    With ``h`` the history, ``c(h)`` how often and ``t(h)`` before how many different characters it
    was seen: ``(c(h x) + t(h) * shorter(x)) / (c(h) + t(h))``; without ``h`` in ``train``, the
    shorter one.
    """
    if min(len(train), len(test)) < length:
        return shorter
    grams, counts = np.unique(to_numbers(train, length, num_ids), return_counts=True)
    histories, first = np.unique(grams // num_ids, return_index=True)
    totals = np.add.reduceat(counts, first)
    kinds = np.diff([*first, len(grams)])

    # The first character of a text is no target, but a history.
    wanted = to_numbers(test[1:] if length == 1 else test, length, num_ids)
    count = look_up(grams, counts, wanted)
    total, kind = (look_up(histories, values, wanted // num_ids) for values in (totals, kinds))
    known = total > 0
    mixed = (count + kind * shorter) / np.where(known, total + kind, 1)
    return np.where(known, mixed, shorter)


def to_numbers(ids: Ints, length: int, num_ids: int) -> Ints:
    """One number for each n-gram of a text, in its order."""
    windows = np.lib.stride_tricks.sliding_window_view(ids, length)
    return windows @ num_ids ** np.arange(length - 1, -1, -1, dtype=np.int64)


def look_up(keys: Ints, values: Ints, wanted: Ints) -> Ints:
    """The value of each wanted key; 0 for keys that are not there. ``keys`` are sorted."""
    places = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)


def main(overrides: Sequence[str]) -> None:
    """Print the baselines for the text of a configuration."""
    from project.language.datamodule import TextDataModule
    from samestep.hydra import build
    from samestep.hydra.compose import check

    data = build.datamodule(check(["experiment=language", *overrides]))
    assert isinstance(data, TextDataModule)
    data.setup("test")
    assert data.train_set is not None
    assert data.vocabulary is not None
    assert data.digest is not None
    train, test = data.train_set.characters, data.test_set.characters
    print(f"{data.origin}, SHA-256 {data.digest[:8]}, {len(test)} test characters")
    for order in (1, 5):
        bits = bits_per_character(train, test, order, len(data.vocabulary))
        print(f"{order}-gram: {bits:.3f} bits per character")


if __name__ == "__main__":
    main(sys.argv[1:])
