"""Checkpoints for nodes that do not share the run directory.

Rank zero writes the run directory. On a shared disk the other nodes see it there. Otherwise each
node has a directory ``runs/<run_id>`` of its own, and gets each checkpoint when it is saved, over
the process group: that costs the network about what two steps of training cost it. When a run
starts, the newest valid checkpoint of all nodes counts, because rank zero may be on another node
than before, or its disk may be lost. Each node then gets what it lacks.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path

import torch
from torch import distributed as dist

from samestep.errors import ConfigError
from samestep.ranks import environment
from samestep.ranks.preflight import is_shared
from samestep.ranks.process_group import broadcast, gather, on_all_ranks, on_rank_zero
from samestep.run import directory, lock, record, seal
from samestep.run.changes import find_changes
from samestep.run.checkpoint import (
    PREVIOUS,
    CheckpointError,
    find_valid,
    link_checkpoint,
    make_way,
)
from samestep.run.directory import BEST, LAST, Start
from samestep.run.files import open_atomic, partial_of, sha256_of
from samestep.spec import RunSpec

RECORDS = ("config.yaml", "run.json")  # without them a checkpoint is no run
BLOCK_BYTES = 16 * 2**20  # of a file in memory, on each node


def begin(spec: RunSpec, argv: list[str], copies: str | None = None) -> Start:
    """Open the run on rank zero, and give every node the checkpoint from which it continues.

    Every rank must call this. ``copies`` is the address of the store that has copies of the runs.

    Returns:
        How far the run has come, with the path of the checkpoint on this node.

    Raises:
        ConfigError, RunError: on every rank; see ``directory.begin``.
    """
    shared = is_shared(spec.run_dir)
    if spec.is_sharded:
        check_same_path(spec)
    if not shared:
        fetch_newest(spec)
    start = on_rank_zero(directory.begin, spec, argv, copies)
    if start.ckpt_path is None:
        return start
    name = f"checkpoints/{Path(start.ckpt_path).name}"
    if not shared:
        send(spec.run_dir, [*RECORDS, BEST, name])
    return start._replace(ckpt_path=str(spec.run_dir / name))


def best_checkpoint(spec: RunSpec) -> str | None:
    """The path on this node of the checkpoint to test; every rank must call this.

    Raises:
        CheckpointError: on every rank, if the best checkpoint has disappeared.
    """
    if on_rank_zero(directory.best_checkpoint, spec.run_dir) is None:
        return None
    if not is_shared(spec.run_dir):
        send(spec.run_dir, [BEST])
    return str(spec.run_dir / BEST)


def last_checkpoint(spec: RunSpec) -> str | None:
    """The path on this node of ``last.ckpt``, if there is one; every rank must call this."""
    if not on_rank_zero((spec.run_dir / LAST).exists):
        return None
    if not is_shared(spec.run_dir):
        send(spec.run_dir, [LAST])
    return str(spec.run_dir / LAST)


def check_same_path(spec: RunSpec) -> None:
    """Raise a ConfigError if FSDP would look for a checkpoint where a node does not have it."""
    paths = gather(str(spec.run_dir.absolute()))
    other = next((path for path in paths if path != paths[0]), None)
    if other is None:
        return
    raise ConfigError(
        f"trainer.strategy=fsdp: all nodes must have the same run_dir, and they have {paths[0]} "
        f"and {other}; give them the same run_root and the same working directory",
        on_all_ranks=True,
    )


def fetch_newest(spec: RunSpec) -> None:
    """Let rank zero have the newest checkpoint of all nodes; every rank must call this.

    Raises:
        ConfigError: if a node holds a run of this name with another configuration.
    """
    ages, names = zip(*gather(on_all_ranks(find_here, spec)), strict=True)
    source = ages.index(max(ages))
    if ages[source] == ages[0]:
        return
    on_rank_zero(lock.acquire, spec.run_dir)
    if environment.rank() == 0:
        print(
            f"The newest checkpoint, of step {ages[source][0]}, is on the node of rank {source}: "
            "rank zero takes it from there",
            flush=True,
        )
    send(spec.run_dir, [*RECORDS, BEST, names[source]], source)


def find_here(spec: RunSpec) -> tuple[tuple[int, str], str]:
    """Age and name of the newest valid checkpoint on this node; its first rank looks for it."""
    nothing = (-1, ""), ""
    if environment.local_rank() != 0:
        return nothing
    try:
        find_changes(spec)
    except ConfigError as error:
        if environment.rank() == 0:
            raise
        raise ConfigError(f"on the node of rank {environment.rank()}: {error}") from error
    known = record.read(spec.run_dir)._replace(run_id=spec.run_id)
    try:
        found = find_valid(spec.run_dir / "checkpoints", known)
    except CheckpointError:
        return nothing  # if no other node has one, rank zero finds this error again
    return (found[1].age, f"checkpoints/{found[0].name}") if found else nothing


def send(run_dir: Path, names: Sequence[str], source: int = 0) -> None:
    """Give the files of rank ``source`` to each node that lacks them; every rank must call this.

    Raises:
        CheckpointError: on every rank, if a file cannot be sent whole, or not be written.
    """
    own = [(name, proof_of(run_dir / name)) for name in names]
    group = first_ranks(dist.group.WORLD)
    for name, proof in broadcast(own, source):
        if proof is None:
            continue  # the source has no such file, or it is damaged
        lacks = on_all_ranks(is_lacking, run_dir / name, proof)
        if any(gather(lacks)):
            on_all_ranks(transfer, run_dir / name, proof, source, group, keep=lacks)


def proof_of(path: Path) -> str | None:
    """The SHA-256 of a record, or that in the seal of a checkpoint; None if it is not intact."""
    if ".ckpt" in path.name:
        found = seal.verify(path)
        return found.sha256 if isinstance(found, seal.Seal) else None
    try:
        return sha256_of(path)
    except OSError:
        return None


def is_lacking(path: Path, proof: str) -> bool:
    """Whether this node lacks the file, as its first rank finds out.

    If it has the same checkpoint under another name, it gets a second name.
    """
    if environment.local_rank() != 0:
        return False
    if path.suffix != ".ckpt":
        return proof_of(path) != proof
    for other in sorted(path.parent.glob("[!.]*.ckpt"), key=lambda other: other != path):
        own = seal.read(other)
        if own and own.sha256 == proof and other.name != PREVIOUS and proof_of(other) == proof:
            if other != path:
                make_way(path)
                link_checkpoint(other, path)
            return False
    return True


@cache
def first_ranks(world: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """A group of the first rank of each node; None on the other ranks.

    It is made once for each ``world``: the store through which its ranks meet may be away later.
    """
    local_ranks = gather(environment.local_rank())
    ranks = [rank for rank, local_rank in enumerate(local_ranks) if local_rank == 0]
    group = dist.new_group(ranks, backend="gloo")
    return group if isinstance(group, dist.ProcessGroup) else None


def transfer(
    path: Path, proof: str, source: int, group: dist.ProcessGroup | None, *, keep: bool
) -> None:
    """Send a file from ``source``, and write it where ``keep`` is true; every rank calls this."""

    def arrive() -> None:
        if proof_of(partial_of(path)) != proof:
            raise CheckpointError(
                f"{path}: it did not arrive whole from its node, and was not kept; the same "
                "command tries again"
            )
        make_way(path)

    blocks = exchange(path, source, group)
    try:
        if keep:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open_atomic(path, before_rename=arrive) as file:
                for block in blocks:
                    file.write(block)
    except OSError as error:
        raise CheckpointError(
            f"rank {environment.rank()}: {path} cannot be written: {error.strerror}; make room or "
            "get permission on this node, or share the run directory between the nodes"
        ) from error
    finally:
        # Also a node whose disk is full takes part to the end: the others need their blocks.
        for _ in blocks:
            pass


def exchange(path: Path, source: int, group: dist.ProcessGroup | None) -> Iterator[memoryview]:
    """The blocks of the file of rank ``source``, on the first rank of each node."""
    block = torch.empty(BLOCK_BYTES if group else 0, dtype=torch.uint8)
    content = block.numpy().data
    with path.open("rb") if environment.rank() == source else nullcontext() as file:
        while True:
            length = 0
            with suppress(OSError):  # a file that cannot be read further does not arrive whole
                length = file.readinto(content) if file else 0
            # All ranks hear of each block, so that none waits for the whole file.
            length = broadcast(length, source)
            if length == 0:
                return
            if group:
                dist.broadcast(block[:length], source, group=group)
                yield content[:length]
