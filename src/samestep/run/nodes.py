"""Checkpoints for nodes that do not share the run directory.

Rank zero writes the run directory. On a shared disk the other nodes see it there. Otherwise each
node has a directory ``runs/<run_id>`` of its own. When a run starts, the newest valid checkpoint of
all nodes counts, because rank zero may be on another node than before. Each node gets what it
lacks: that checkpoint, the best one, and the records which say whose they are. Before the test
each node gets the best checkpoint. The files come over the process group in blocks, are verified by
their SHA-256, and take their names as those of a save do. So a node that becomes rank zero later
can continue from them.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed as dist

from samestep.errors import ConfigError
from samestep.ranks import environment
from samestep.ranks.preflight import is_shared
from samestep.ranks.process_group import broadcast, gather, on_all_ranks, on_rank_zero
from samestep.run import directory, lock, sidecar
from samestep.run.changes import find_changes
from samestep.run.checkpoint import CheckpointError, find_valid, link_checkpoint, verify
from samestep.run.directory import Start
from samestep.run.files import open_atomic, sha256_of
from samestep.run.identity import Identity, read_identity
from samestep.run.sidecar import Version
from samestep.spec import RunSpec

BEST = "checkpoints/best.ckpt"
RECORDS = ("config.yaml", "run.json")
BLOCK_BYTES = 16 * 2**20  # of a file in memory, on each node

Group = dist.ProcessGroup


class File(NamedTuple):
    """A file of the run directory, as the node that sends it has it."""

    name: str
    version: Version


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
        send(spec, [*RECORDS, BEST, name], source=0)
    return start._replace(ckpt_path=str(spec.run_dir / name))


def best_checkpoint(spec: RunSpec) -> str | None:
    """The path on this node of the checkpoint to test; every rank must call this.

    Raises:
        CheckpointError: on every rank, if the best checkpoint has disappeared.
    """
    if on_rank_zero(directory.best_checkpoint, spec.run_dir) is None:
        return None
    if not is_shared(spec.run_dir):
        send(spec, [BEST], source=0)
    return str(spec.run_dir / BEST)


def last_checkpoint(spec: RunSpec) -> str | None:
    """The path on this node of ``last.ckpt``, if there is one; every rank must call this."""
    last = spec.run_dir / "checkpoints" / "last.ckpt"
    if not on_rank_zero(last.exists):
        return None
    if not is_shared(spec.run_dir):
        send(spec, ["checkpoints/last.ckpt"], source=0)
    return str(last)


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
    found = gather(on_all_ranks(find_here, spec))
    steps = [file.version.global_step if file else -1 for file in found]
    source = steps.index(max(steps))
    newest = found[source]
    if newest is None or steps[source] == steps[0]:
        return
    on_rank_zero(lock.acquire, spec.run_dir)
    if environment.rank() == 0:
        print(
            f"The newest checkpoint, of step {steps[source]}, is on the node of rank {source}: "
            "rank zero takes it from there",
            flush=True,
        )
    send(spec, [*RECORDS, BEST, newest.name], source)


def find_here(spec: RunSpec) -> File | None:
    """The newest valid checkpoint on this node, which its first rank looks for."""
    if environment.local_rank() != 0:
        return None
    run_dir = spec.run_dir
    try:
        find_changes(spec)
    except ConfigError as error:
        if environment.rank() == 0:
            raise
        raise ConfigError(f"on the node of rank {environment.rank()}: {error}") from error
    known = read_identity(run_dir)
    try:
        found = find_valid(run_dir / "checkpoints", Identity(spec.run_id, known.configs))
    except CheckpointError:
        return None  # if no other node has one, rank zero finds this error again
    if found is None:
        return None
    path, version = found
    return File(f"checkpoints/{path.name}", version)


def send(spec: RunSpec, names: list[str], source: int) -> None:
    """Give the files of rank ``source`` to each node that lacks them; every rank must call this.

    Raises:
        CheckpointError: on every rank, if a file cannot be read, sent whole, or written.
    """
    run_dir = spec.run_dir
    is_source = environment.rank() == source
    files = broadcast(on_all_ranks(describe, run_dir, names if is_source else []), source)
    with first_ranks(spec.timeout_s) as group:
        for file in files:
            lacks = on_all_ranks(is_lacking, run_dir, file, group)
            if any(gather(lacks)):
                on_all_ranks(transfer, run_dir, file, source, group, keep=lacks)


def describe(run_dir: Path, names: list[str]) -> list[File]:
    """Those of the files that are here and whole, with their digests."""
    files = []
    for name in names:
        path = run_dir / name
        version: Version | str = "it is absent"
        if name.endswith(".ckpt"):
            version = verify(path, read_identity(run_dir))
        elif path.is_file():
            version = Version(sha256_of(path), name)
        if isinstance(version, Version):
            files.append(File(name, version))
    return files


def is_lacking(run_dir: Path, file: File, group: Group | None) -> bool:
    """Whether this node lacks the file, as its first rank finds out.

    If the last checkpoint is the best one, the node has it already, and links it.
    """
    if group is None:
        return False
    path, best = run_dir / file.name, run_dir / BEST
    if has(path, file):
        return False
    if path.name == "last.ckpt" and has(best, file):
        link_checkpoint(best, path, file.version)
        return False
    return True


def has(path: Path, file: File) -> bool:
    """Whether the file at ``path`` has the content of ``file``, and a checkpoint its sidecar."""
    try:
        same = sha256_of(path) == file.version.sha256
    except OSError:
        return False
    return same and (path.suffix != ".ckpt" or isinstance(verify(path, Identity()), Version))


@contextmanager
def first_ranks(timeout_s: float) -> Iterator[Group | None]:
    """A group of the first rank of each node; None on the other ranks."""
    local_ranks = gather(environment.local_rank())
    ranks = [rank for rank, local_rank in enumerate(local_ranks) if local_rank == 0]
    timeout = timedelta(seconds=timeout_s + 10)
    group = dist.new_group(ranks, timeout=timeout, backend="gloo")
    if not isinstance(group, Group):  # this rank is not in it
        yield None
        return
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def transfer(run_dir: Path, file: File, source: int, group: Group | None, *, keep: bool) -> None:
    """Send a file from ``source``, and write it where ``keep`` is true; every rank calls this."""
    path = run_dir / file.name
    if environment.rank() == source:
        send_blocks(path, group)
        return
    blocks = receive_blocks(source, group)
    try:
        if keep:
            write(path, file.version, blocks)
    finally:
        # Also a node whose disk is full takes part to the end: the others need their blocks.
        for _ in blocks:
            pass


def send_blocks(path: Path, group: Group | None) -> None:
    """Send a file: the length of each block to all ranks, the block to the first of each node."""
    source = environment.rank()
    block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    try:
        with path.open("rb") as file:
            while length := file.readinto(block.numpy().data):
                # All ranks hear of each block, so that none waits for the whole file.
                dist.broadcast(torch.tensor(length), source)
                dist.broadcast(block[:length], source, group=group)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    finally:
        dist.broadcast(torch.tensor(0), source)


def receive_blocks(source: int, group: Group | None) -> Iterator[memoryview]:
    """The blocks of the file that ``source`` sends; none outside of the group."""
    block = torch.empty(BLOCK_BYTES if group else 0, dtype=torch.uint8)
    length = torch.tensor(0)
    while True:
        dist.broadcast(length, source)
        if length == 0:
            return
        if group:
            dist.broadcast(block[: int(length)], source, group=group)
            yield block[: int(length)].numpy().data


def write(path: Path, version: Version, blocks: Iterator[memoryview]) -> None:
    """Write a file that is received, if it is what was announced; otherwise nothing."""
    sha256 = hashlib.sha256()

    def verify_and_describe() -> None:
        if sha256.hexdigest() != version.sha256:
            raise CheckpointError(
                f"{path}: it did not arrive whole from its node, and was not kept; the same "
                "command tries again"
            )
        if path.suffix == ".ckpt":
            sidecar.write(path, version)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(path, before_rename=verify_and_describe) as file:
            for block in blocks:
                sha256.update(block)
                file.write(block)
    except OSError as error:
        raise CheckpointError(
            f"rank {environment.rank()}: {path} cannot be written: {error.strerror}; make room or "
            "get permission on this node, or share the run directory between the nodes"
        ) from error
