"""All facts of one run. Imports no torch, no Hydra."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunSpec:
    """The facts of one run, made once: from a DictConfig, or from the arguments of a Trainer.

    ``ranks``, ``run`` and ``callbacks`` take a RunSpec or single values of it, never the
    configuration of a framework. No field depends on a YAML key.
    """

    run_id: str
    run_dir: Path
    seed: int
    config: Mapping[str, Any] = field(default_factory=dict)
    """All values, nested, resolved and without secrets: ``config.yaml`` and what is compared."""

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

    # How it continues
    allow_changes: Sequence[str] = ()
    """Keys of ``config`` that this start may change, although they make another run."""
    may_change: Sequence[str] = ()
    """Patterns of the user's keys that do not change what is learned."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Every ``max_*`` of the Trainer: a finished run continues if one of them is higher."""
    saves_nothing: bool = False
    """``fast_dev_run``."""
    overridden: Mapping[str, str] = field(default_factory=dict)
    """What has set each value that is not the default, for the records."""
    notes: str = ""
    """What the run is about, for people."""
    tags: Sequence[str] = ()
    """Words that mark the run in lists."""
    another_run: str = "another run_dir"
    """How the user asks for a new run, for messages."""
    override_hint: str = "allow_changes="
    """How the user allows a change, for messages."""

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
        f"cluster.shares={list(shares)}: the run may have {num_ranks} ranks on {num_nodes} nodes; "
        "give one number for each rank, or one for each node, or say cluster.shares=auto"
    )
