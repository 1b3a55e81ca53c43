"""Notices what a user's data divide by the number of ranks while their loaders are made.

``split_batches`` and ``BatchLoader`` divide each batch over the ranks. Many DataModules do so
themselves, since a plain DataLoader needs it: ``batch_size // self.trainer.world_size``. Both
together take twice as many steps on two ranks, with half of the samples in each.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed as dist

_is_watching = False
_divisions: dict[float, float] = {}  # what was divided by a number of ranks, by the quotient


class RankCount(int):
    """A number of ranks that notes what is divided by it."""

    def __rfloordiv__(self, other: Any) -> Any:
        return _note(other, other // int(self))

    def __rtruediv__(self, other: Any) -> Any:
        return _note(other, other / int(self))

    def __rdivmod__(self, other: Any) -> Any:
        quotient, rest = divmod(other, int(self))
        return _note(other, quotient), rest

    # Nodes times devices on each of them.
    def __mul__(self, other: Any) -> Any:
        product = int(self) * other
        return RankCount(product) if type(product) is int else product

    __rmul__ = __mul__

    def __reduce__(self) -> Any:
        # An object of the user's that keeps it is read again without this class.
        return int, (int(self),)


def _note(number: Any, quotient: Any) -> Any:
    if isinstance(quotient, int | float):
        _divisions[quotient] = number
    return quotient


def watched(num_ranks: int) -> int:
    """The number of ranks, as the code of a user gets it while its loaders are made."""
    return RankCount(num_ranks) if _is_watching and num_ranks > 1 else num_ranks


@contextmanager
def watching() -> Iterator[None]:
    """Notice within this block what is divided by the number of ranks."""
    global _is_watching
    was_watching, _is_watching = _is_watching, True
    get_world_size = dist.get_world_size

    def get_watched(group: Any = None) -> int:
        return watched(get_world_size(group))

    dist.get_world_size = get_watched
    try:
        yield
    finally:
        dist.get_world_size = get_world_size
        _is_watching = was_watching


def forget_divisions() -> None:
    """Forget what was divided: the next loaders may be those of another Trainer."""
    _divisions.clear()


def find_divided(quotient: int) -> float | None:
    """What was divided by the number of ranks with this result; None if nothing was."""
    # int(64 / 2): the quotient was a float.
    return _divisions.get(quotient)
