"""What the recorders of one run have written. Imports no torch."""

import base64
import json
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from samestep.verify.plan import file_of

Place = tuple[int, int]
"""An epoch, and a batch in it."""


class Summary(NamedTuple):
    """Of one tensor: a checksum of all its bytes, and some of its values."""

    checksum: int
    sum: float
    absolute_sum: float
    values: Sequence[float]


State = dict[str, Summary]
"""Parameters, optimizer states and buffers by what the table calls them."""


Summaries = dict[str, tuple[int, str]]
"""A state as the recorder writes it; see ``read_state``."""


class Batch(NamedTuple):
    """What one rank did with one batch."""

    step: int  # optimizer steps before it
    rows: list[int]  # a digest of each sample
    loss: float | None
    state: Summaries | None  # after the optimizer step, if there was one


@dataclass
class Rank:
    """All that one rank has recorded. What a run has repeated takes the place of what was."""

    fits: list[dict[str, Any]] = field(default_factory=list)
    batches: dict[Place, Batch] = field(default_factory=dict)
    evaluations: dict[tuple[str, int, int], dict[str, float]] = field(default_factory=dict)
    """Metrics by stage, epoch and step."""
    final: Summaries | None = None
    splits_evaluation: bool = True
    """Whether ranks get slices of the batches of validation and test."""

    def add(self, line: dict[str, Any]) -> None:
        """Take one line of the file."""
        if "fit" in line:
            self.fits.append(line)
        elif "place" in line:
            epoch, batch = line["place"]
            # After SIGKILL a run repeats steps; the new ones count, as they do for its weights.
            self.batches[epoch, batch] = Batch(
                line["step"], line["rows"], line.get("loss"), line.get("state")
            )
        elif "stage" in line:
            self.evaluations[line["stage"], *line["at"]] = line["metrics"]
            self.splits_evaluation &= line["is_split"]
        elif "final" in line:
            self.final = line["final"]

    def rows_at(self, place: Place) -> list[int]:
        """The samples of one batch; none where this rank has no such batch."""
        return self.batches[place].rows if place in self.batches else []


def read(folder: Path) -> list[Rank]:
    """The records of all ranks; none if no rank has begun to train."""
    ranks: list[Rank] = []
    while file_of(folder, len(ranks)).exists():
        rank = Rank()
        for line in file_of(folder, len(ranks)).read_text().splitlines():
            # A rank that was killed may leave half a line.
            with suppress(ValueError):
                rank.add(json.loads(line))
        ranks.append(rank)
    return ranks


def read_state(state: Summaries | None) -> State:
    """Decode the summaries; this is done for few steps only, as a run has many tensors."""
    found = {}
    for name, (checksum, content) in (state or {}).items():
        numbers = array("d", base64.b64decode(content))
        found[name] = Summary(checksum, numbers[0], numbers[1], numbers[2:])
    return found
