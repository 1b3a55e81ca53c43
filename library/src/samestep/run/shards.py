"""The tensors of a sharded model: a folder beside the checkpoint, with one file for each rank.

checkpoints/
    last.ckpt                       all but the tensors; its manifest names the folder
    shards-120-2-1f3a5c7d/          of step 120, by 2 ranks
        0.shard  1.shard            each with a manifest of its own

The folder is written first, so a visible checkpoint always has its tensors. Its name is never used
again. A folder that no checkpoint names is left over, from a save that was killed or a checkpoint
that was removed, and ``prune`` removes it. No shard contains pickled code, and ``unzip -z`` shows
its manifest.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.ranks.sharded import map_tensors, part_of
from samestep.run import manifest

Assemble = Callable[[Tensor, int, Callable[[int, int], Tensor]], Tensor]
"""Makes a tensor, given an empty one of its shape (on the device meta), the dimension in which it
was cut, and a function that reads a range of that dimension."""


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


def assemble_whole(tensor: Tensor, dim: int, read: Callable[[int, int], Tensor]) -> Tensor:
    """The whole tensor, on every rank."""
    return read(0, tensor.shape[dim]) if dim >= 0 else tensor


def prune(folder: Path) -> None:
    """Remove the shards that no checkpoint in ``folder`` names.

    On rank zero only, and never while a checkpoint is written: its shards have no name there yet.
    """
    checkpoints = manifest.read_all(manifest.find_checkpoints(folder))
    named = {own.shards for own in checkpoints}
    for path in folder.glob("shards-*"):
        if path.name not in named:
            shutil.rmtree(path, ignore_errors=True)
