"""Checkpoints for nodes that do not share the run directory; ``run.copies`` loads this plug-in.

Rank zero writes the run directory. On a shared disk the other nodes see it there. Otherwise each
node has a directory ``runs/<run_id>`` of its own, and its first rank keeps a copy of each
checkpoint there. Each node gets it from the one before: that costs its network about what two steps
of training cost it. When a run starts, the newest valid checkpoint of all nodes counts, because
rank zero may be on another node than before, or its disk may be lost.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import torch

from samestep.errors import ConfigError
from samestep.ranks import collectives, environment
from samestep.ranks.process_group import broadcast, gather, on_all_ranks, on_rank_zero
from samestep.run import lock, manifest, record
from samestep.run.changes import find_changes
from samestep.run.checkpoint import CheckpointError, find_valid, rotate_last
from samestep.run.files import (
    link_file,
    open_atomic,
    partial_of,
    read_bytes,
    write_if_changed,
    writing,
)
from samestep.run.layout import BEST, IDENTITY
from samestep.run.manifest import Manifest
from samestep.run_spec import RunSpec

BLOCK_BYTES = 16 * 2**20  # of a file in memory, on each node


class Offer(NamedTuple):
    """What one rank has and the other nodes may lack."""

    records: Mapping[str, bytes | None]  # by name; None if there is no such file
    checkpoints: Sequence[tuple[str, Manifest, int]]  # name, manifest, and size in bytes


def fetch_newest(spec: RunSpec) -> None:
    """Let rank zero have the newest checkpoint of all nodes; every rank must call this."""
    ages, names = zip(*gather(on_all_ranks(find_here, spec)), strict=True)
    source = ages.index(max(ages))
    if ages[source] == ages[0]:
        return
    on_rank_zero(lock.acquire, spec.run_dir)
    if environment.rank() == 0:
        print(
            f"The newest checkpoint, of step {ages[source][0]}, is on the node of rank {source}: "
            "rank zero fetches it",
            flush=True,
        )
    replicate(spec.run_dir, [BEST, names[source]], source)


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


def replicate(run_dir: Path, names: Sequence[str], source: int = 0) -> None:
    """Give the records and these checkpoints of rank ``source`` to each node that lacks them.

    Every rank must call this.
    """
    offer = Offer({}, [])
    if environment.rank() == source:
        offer = make_offer(run_dir, names)
    records, checkpoints = broadcast(offer, source)
    # The first rank of each node writes.
    receives = environment.local_rank() == 0 and environment.rank() != source
    on_all_ranks(write_records, run_dir, records if receives else {})
    arrived: dict[Manifest, Path] = {}
    for name, wanted, size in checkpoints:
        path = run_dir / name
        # Most differ in their manifests, which are read much faster than whole files.
        lacks = receives and not (manifest.read(path) == wanted == manifest.verify(path))
        receivers = [*compress(range(environment.world_size()), gather(lacks))]
        if wanted in arrived:
            on_all_ranks(add_name, arrived[wanted], path, is_due=lacks)
        elif receivers:
            on_all_ranks(transfer, path, wanted, size, [source, *receivers])
        arrived[wanted] = path


def make_offer(run_dir: Path, names: Sequence[str]) -> Offer:
    """What this rank can send of these checkpoints."""
    records = {name: read_bytes(run_dir / name) for name in IDENTITY}
    checkpoints = []
    for name in names:
        # One that is missing or damaged is left out: rank zero repairs it, or says so.
        found = manifest.verify(run_dir / name)
        if isinstance(found, Manifest):
            checkpoints.append((name, found, (run_dir / name).stat().st_size))
    return Offer(records, checkpoints)


def write_records(run_dir: Path, records: Mapping[str, bytes | None]) -> None:
    """Write the records that differ here."""
    with writing(run_dir):
        for name, content in records.items():
            (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
            write_if_changed(run_dir / name, content)


def add_name(source: Path, target: Path, *, is_due: bool) -> None:
    """Give a checkpoint the second name that it has on rank zero's node."""
    if is_due:
        with writing(target):
            rotate_last(target)
            link_file(source, target)


def transfer(path: Path, wanted: Manifest, size: int, chain: Sequence[int]) -> None:
    """Send a checkpoint along a chain of ranks: the first has it, the others write it."""

    def arrive() -> None:
        if manifest.verify(partial_of(path)) != wanted:
            raise CheckpointError(
                f"{path}: the copy from its node was incomplete, and was deleted; the "
                "same command tries again"
            )
        rotate_last(path)

    if environment.rank() not in chain:
        return
    blocks = relay_blocks(path, size, chain)
    try:
        if environment.rank() != chain[0]:
            with writing(path), open_atomic(path, before_rename=arrive) as file:
                file.writelines(blocks)
    finally:
        # Also a node whose disk is full passes on what it gets: the next one needs it.
        for _ in blocks:
            pass


def relay_blocks(path: Path, size: int, chain: Sequence[int]) -> Iterator[memoryview]:
    """The blocks of a file: the first rank of the chain reads them, each gives them to the next."""
    place = chain.index(environment.rank())
    block = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    with path.open("rb") if place == 0 else nullcontext() as file:
        for start in range(0, size, BLOCK_BYTES):
            part = block[: size - start]
            content = part.numpy().data
            if file:
                content[:] = file.read(len(content))
            else:
                collectives.receive(part, chain[place - 1])
            if place + 1 < len(chain):
                collectives.send(part, chain[place + 1])
            yield content
