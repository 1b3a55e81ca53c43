"""All facts of one run. Imports no torch, no Hydra."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.option_names import setting

LOSS, RANDOM, BATCH_NORM = "loss", "random_numbers", "batch_norm"
KNOWN_DIFFERENCES = LOSS, RANDOM, BATCH_NORM
"""What may make other steps on another number of ranks, if a run is allowed to."""


def no_report(run_dir: Path) -> None:
    """Write nothing: what a run without a report does at its end."""


@dataclass(frozen=True)
class RunSpec:
    """The facts of one run. ``samestep.Trainer`` makes it from its arguments.

    ``ranks``, ``run`` and ``callbacks`` take a RunSpec or single values of it, never the
    configuration of a framework. No field depends on a YAML key.
    """

    run_id: str
    run_dir: Path
    seed: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    """All values, nested, resolved and without secrets: ``config.yaml`` and what is compared.
    ``notes`` and ``tags`` in it are for people."""

    # Where it runs
    accelerator: str = "auto"
    devices: int | str = 1
    """Processes per node; under torchrun only compared with what it has started."""
    num_nodes: int | None = 1
    """Machines; None where nodes may come and go."""
    strategy: str = "auto"
    """Its name, or the full name of the class of an object."""
    sync_batchnorm: bool = False
    deterministic: bool = False
    timeout_s: float = 300.0
    """Seconds that a rank waits for the others."""
    shares: str | Sequence[float] = "equal"
    """``equal``, ``auto``, or how much of each batch a rank or node gets."""
    split_batches: bool = False
    """Whether ``batch_size`` of an ordinary DataLoader counts samples over all ranks."""
    virtual_ranks: int | None = None
    """Slices of each batch, on whatever number of ranks up to this one; None: one for each."""
    notice: Any = None
    """What announces that this machine will be taken away; None if nothing does."""
    accumulates: bool = False
    """Whether an optimizer step has several batches."""
    allow: Sequence[str] = ()
    """Some of ``KNOWN_DIFFERENCES``, about which no note is printed."""

    # How it continues
    allow_changes: Sequence[str] = ()
    """Keys of ``config`` that this start may change, although they make another run."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Every ``max_*`` of the Trainer, and the patience of early stopping: a finished run continues
    if one of them is higher."""
    saves_nothing: bool = False
    """``fast_dev_run``."""

    # What a front end such as samestep.hydra adds
    command: Sequence[str] = ()
    """The command line of this start, for the records."""
    overridden: Mapping[str, str] = field(default_factory=dict)
    """What has set each value that is not the default, for the records."""
    option_names: Mapping[str, str] = field(default_factory=dict)
    """How the user types each argument, for messages; see ``samestep.option_names``."""
    option_words: Mapping[str, str] = field(default_factory=dict)
    """How the user types None, True and False."""
    another_run: str = "another run_dir"
    """How the user asks for a new run, for messages."""
    is_elastic: bool = False
    """Whether nodes may come and go, so that their number is not known."""
    ends_with_test: bool = False
    """Whether ``test`` follows ``fit`` and ends the run; otherwise ``fit`` ends it."""
    resume_command: Callable[["RunSpec"], str] = lambda spec: "the same command"
    """What the user types to continue a run that was stopped."""
    make_loggers: Callable[[], Sequence[Any]] | None = None
    """Makes the trackers on rank zero, when the run has begun: they write files."""
    report: Callable[[Path], None] = no_report
    """Writes a report of the run directory."""
    summarize: Callable[[Path], str] = lambda run_dir: f"Finished: {run_dir}"
    """What a finished run prints."""

    @property
    def is_fsdp(self) -> bool:
        """Whether each rank has a part of the model only."""
        return self.strategy == "fsdp"


def select(config: Any, key: str) -> Any:
    """The value of a full key such as ``trainer.max_epochs``; None where there is none."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


def leaves(value: Any, key: str = "") -> dict[str, Any]:
    """The values below ``key`` by their full keys: ``{"a": {"b": 1}}`` is ``{"a.b": 1}``.

    Lists, and groups without keys, are values.
    """
    if not isinstance(value, dict) or not value:
        return {key: value}
    found: dict[str, Any] = {}
    for name in value:
        found |= leaves(value[name], f"{key}.{name}" if key else name)
    return found


def check_shares(shares: Sequence[float], num_nodes: int, num_ranks: int) -> str | None:
    """Why this list of shares does not fit so many nodes and ranks; None if it does."""
    if len(shares) in (num_nodes, num_ranks):
        return None
    return (
        f"{setting('shares', list(shares))}: the run may have {num_ranks} ranks on {num_nodes} "
        "nodes; give one number for each rank, or one for each node, or say "
        f"{setting('shares', 'auto')}"
    )
