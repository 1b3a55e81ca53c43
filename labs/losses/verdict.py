"""Compares a run on several ranks with the one on one rank.

exact      The weights at the end and what is logged differ by ``TOLERANCE`` at most.
announced  They differ more, and the run had said so before its first step.

The rest must not be: *silent*, where nothing was said (batches that are cut may be); *noise*, where
a note was printed and nothing differs; *failed*, where there is no result.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from labs.losses.program import ACCUMULATED, CUT, WHOLE, Result
from samestep.run_spec import KNOWN_DIFFERENCES

TOLERANCE = 1e-12
EXACT, ANNOUNCED, SILENT, NOISE, FAILED = "exact", "announced", "silent", "noise", "failed"
RUNS = ((WHOLE, 2), (WHOLE, 3), (ACCUMULATED, 2), (CUT, 1), (CUT, 3))
"""Those that are compared with one rank."""


class Verdict(NamedTuple):
    word: str
    difference: float = 0.0
    notes: tuple[str, ...] = ()


def judge(
    results: Mapping[tuple[str, int], Result], mode: str, num_ranks: int, *, draws: bool = False
) -> Verdict:
    """The verdict on a run.

    Args:
        results: of a form of a shape, by mode and number of ranks.
        mode: of the run.
        num_ranks: of the run.
        draws: whether its steps draw random numbers.
    """
    ours = results.get((mode, num_ranks))
    # A batch that is cut must make the step that it makes as a whole. If it draws random numbers,
    # nobody expects that: then it need only be independent of the number of ranks.
    is_whole_expected = mode == CUT and not draws
    reference = results.get((WHOLE if is_whole_expected else mode, 1))
    # But what is logged for each of its parts is another mean.
    logged = results.get((mode, 1))
    if ours is None or reference is None or logged is None:
        return Verdict(FAILED)
    difference = max(
        largest_difference(ours.weights, reference.weights),
        largest_difference(ours.metrics, logged.metrics),
    )
    notes = notes_in(ours.said)
    is_exact = difference <= TOLERANCE
    if notes:
        return Verdict(NOISE if is_exact else ANNOUNCED, difference, notes)
    return Verdict(EXACT if is_exact else SILENT, difference)


def is_good(verdict: Verdict, mode: str, *, is_mended: bool) -> bool:
    """Whether a run may end so; a remedy must be exact, unless it cannot know the whole step."""
    if mode == CUT:
        # The few samples of a part of a slice may show nothing.
        return verdict.word in (EXACT, ANNOUNCED, SILENT)
    return verdict.word == EXACT or (verdict.word == ANNOUNCED and not is_mended)


def notes_in(said: str) -> tuple[str, ...]:
    """What the notes that were printed name, as ``Trainer(allow=)`` does."""
    notes = "\n".join(re.findall("^Note: .*$", said, re.M))
    return tuple(kind for kind in KNOWN_DIFFERENCES if f"[{kind}]" in notes)


def largest_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest difference of two sets of tensors, in units of the larger of 1 and their size."""
    if ours.keys() != theirs.keys():
        return torch.inf
    largest = 0.0
    for name, tensor in ours.items():
        expected = theirs[name].double()
        size = max(1.0, expected.abs().max().item())
        difference = (tensor.double() - expected).abs().max().item() / size
        # Also a nan, which is equal to nothing.
        if not difference <= largest:
            largest = difference if difference == difference else torch.inf
    return largest


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict that a cell shows for several runs."""
    order = EXACT, ANNOUNCED, NOISE, SILENT, FAILED
    return max(verdicts, key=lambda verdict: (order.index(verdict.word), verdict.difference))
