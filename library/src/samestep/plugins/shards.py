"""The tensors of a sharded model: a folder beside the checkpoint, with one file for each rank.

checkpoints/
    last.ckpt                       all but the tensors; its manifest names the folder
    shards-120-2-1f3a5c7d/          of step 120, by 2 ranks
        0.shard  1.shard            each with a manifest of its own

The folder is written first, so a visible checkpoint always has its tensors. Its name is never used
again. A folder that no checkpoint names is left over, from a save that was killed or a checkpoint
that was removed, and ``manifest.prune`` removes it. No shard contains pickled code, and
``unzip -z`` shows its manifest.
"""

import io
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.ranks import environment
from samestep.ranks.process_group import broadcast, gather, on_all_ranks
from samestep.run.checkpoint import (
    Assemble,
    AtomicCheckpointIO,
    PendingSave,
    map_tensors,
    open_target,
    write,
    write_atomic,
)


def save(
    checkpoint_io: AtomicCheckpointIO,
    checkpoint: dict[str, Any],
    tensors: dict[str, Tensor],
    path: str | Path,
) -> None:
    """Write a sharded checkpoint: first each rank its tensors, then rank zero the rest.

    With ``in_background`` a thread writes the tensors, and ``commit`` the rest. Every rank must
    call ``commit`` before the next save.
    """
    path, rank = Path(path), environment.rank()
    step, num_ranks = checkpoint["global_step"], environment.world_size()
    # Never the same name twice: a save that fails must not damage the shards of another one.
    name = broadcast(f"shards-{step}-{num_ranks}-{secrets.token_hex(4)}")
    rest = checkpoint | {"shards": name}
    if checkpoint_io.dry_run:
        if rank == 0:
            checkpoint_io.save_checkpoint(rest, path)
        return
    is_of_run = checkpoint_io.check_place(path)
    target = path.parent / name / f"{rank}.shard"
    content = {"tensors": tensors, "global_step": step, "shards": f"{name}/{target.name}"}
    known = checkpoint_io.read_record(path)
    # Now, as the training goes on while the thread writes. The rest is small.
    file = io.BytesIO()
    if rank == 0:
        write(checkpoint_io.examine(rest), file, known, is_of_run=is_of_run)

    def write_rest() -> None:
        if rank == 0:
            with open_target(path, is_of_run=is_of_run) as target:
                target.write(file.getvalue())

    # All ranks do the same: the rest names the shards, so it must not exist before all of them do.
    num_ranks = environment.local_world_size()
    if checkpoint_io.in_background and all(gather(checkpoint_io.has_room(content, num_ranks))):
        written = checkpoint_io.start(content, target, known)
        checkpoint_io.pending = PendingSave(written, write_rest)
    else:
        on_all_ranks(write_atomic, content, target, known)
        write_rest()


class ShardReader:
    """The shards of one checkpoint, opened when they are needed.

    Args:
        files: the shards of all ranks, in their order.
        dims: the dimension in which each tensor was cut, by its path; -1 if it was not.
    """

    def __init__(self, files: Sequence[Path], dims: Mapping[str, int]) -> None:
        self.files, self.dims = files, dims
        self._opened: dict[int, dict[str, Tensor]] = {}

    def read(self, path: str, length: int, start: int, stop: int) -> Tensor:
        """The range from ``start`` to ``stop`` of a tensor that was cut into shards.

        The number of ranks may have changed since, so a range may span several shards.
        """
        dim = self.dims[path]
        pieces = []
        for rank in range(len(self.files)):
            first, end = part_of(length, rank, len(self.files))
            begin = max(start, first)
            size = min(stop, end) - begin
            if size > 0:
                pieces.append(self._open(rank)[path].narrow(dim, begin - first, size))
        if pieces:
            return torch.cat(pieces, dim)
        # With more ranks than rows, some have none. An empty piece has the right type and shape.
        return self._open(0)[path].narrow(dim, 0, 0).clone()

    def _open(self, rank: int) -> dict[str, Tensor]:
        if rank not in self._opened:
            # Mapped: of a file only the ranges are read that this rank needs.
            content = torch.load(self.files[rank], map_location="cpu", weights_only=True, mmap=True)
            self._opened[rank] = content["tensors"]
        return self._opened[rank]


def fill(
    checkpoint: dict[str, Any], files: Sequence[Path], assemble: Assemble | None
) -> dict[str, Any]:
    """The checkpoint with its tensors, read from its shards.

    Args:
        checkpoint: as saved: ``sharded`` has the dimension in which each tensor was cut.
        files: the shards of all ranks.
        assemble: distributes each tensor as a strategy needs it; None makes whole tensors.
    """
    dims: dict[str, int] = checkpoint.pop("sharded")
    reader = ShardReader(files, dims)
    assemble = assemble or assemble_whole

    def fill_one(path: str, tensor: Tensor) -> Tensor:
        if path not in dims:
            return tensor
        dim = dims[path]

        def read(start: int, stop: int) -> Tensor:
            return reader.read(path, tensor.shape[dim], start, stop)

        return assemble(tensor, dim, read)

    filled: dict[str, Any] = map_tensors(checkpoint, fill_one)
    return filled


def part_of(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """Where the part of a rank begins and ends in a dimension, as ``torch.chunk`` cuts it."""
    size = -(-length // world_size)  # rounded up
    # The last ranks may have less, or nothing.
    return min(rank * size, length), min((rank + 1) * size, length)


def assemble_whole(tensor: Tensor, dim: int, read: Callable[[int, int], Tensor]) -> Tensor:
    """The whole tensor, on every rank."""
    return read(0, tensor.shape[dim]) if dim >= 0 else tensor
