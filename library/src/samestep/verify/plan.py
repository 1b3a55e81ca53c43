"""What one program of an experiment must do, and where it leaves what it has done. No torch."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from samestep.ranks import environment

NUM_EPOCHS = 3  # one undisturbed, one in which a run is stopped, and one in which it is killed


FIRST_STEP = "--- samestep verify: the first step ---"
"""A line that rank zero prints: what is said later comes too late."""


@dataclass(frozen=True)
class Plan:
    """What one program of an experiment must do. It travels as JSON in a variable."""

    records: str
    """Folder in which each rank records what it did."""
    run_root: str
    """Folder for the run directory, wherever the command has it."""
    devices: int = 1
    """Ranks, all on this machine."""
    accelerator: str = "cpu"
    num_steps: int | None = None
    """Optimizer steps over ``NUM_EPOCHS`` epochs; None leaves all limits as they are."""
    num_evaluated: int | None = None
    """Batches of a validation or test, on each rank."""
    precision: str | None = None
    """Takes the place of the command's; None leaves it as it is."""
    adds_in_order: bool = False
    """Whether the ranks must add their gradients in one order: ``deterministic=True``."""
    signum: int = 0
    """The signal that the last rank sends to itself, once."""
    place: tuple[int, int] | None = None
    """Epoch and batch at whose start it does so."""

    def to_json(self) -> str:
        """The value of the variable ``environment.VERIFY``."""
        return json.dumps(asdict(self))


def read() -> Plan:
    """The plan of this program."""
    values = environment.verify_plan()
    assert values is not None
    place = values["place"]
    return Plan(**values | {"place": tuple(place) if place else None})


def file_of(folder: Path, rank: int) -> Path:
    """The file of one rank."""
    return folder / f"rank-{rank}.jsonl"


def done_file(folder: Path) -> Path:
    """The file that exists once a signal was sent."""
    return folder / "signal-was-sent"
