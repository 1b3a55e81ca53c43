"""The tensors of a sharded model: a folder beside the checkpoint, with one file for each rank.

checkpoints/
    last.ckpt                       all but the tensors; its manifest names the folder
    shards-120-2-1f3a5c7d/          of step 120, by 2 ranks
        0.shard  1.shard            each with a manifest of its own

The folder is written first, so a checkpoint that can be seen has its tensors. Its name is never
used again. A folder that no checkpoint names is left by a save that was killed, or by a checkpoint
that is gone, and is removed. Nothing in it is pickled code, and ``unzip -z`` shows each manifest.
"""

import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.ranks.sharded import map_tensors, part_of
from samestep.run import manifest

Assemble = Callable[[Tensor, int, Callable[[int, int], Tensor]], Tensor]
"""Makes a tensor, given one of its shape on the device meta, the dimension in which it was cut,
and what reads a range of it there."""


def fill(
    checkpoint: dict[str, Any], files: Sequence[Path], assemble: Assemble | None
) -> dict[str, Any]:
    """The checkpoint with its tensors, which are read from the files of its shards.

    Args:
        checkpoint: as it was saved: ``sharded`` says how each tensor was cut, by its path.
        files: of all ranks; one is opened when a tensor needs it.
        assemble: as a strategy shards them; None: whole.
    """
    dims: dict[str, int] = checkpoint.pop("sharded")
    assemble = assemble or assemble_whole

    @cache
    def tensors_of(rank: int) -> dict[str, Tensor]:
        content = torch.load(files[rank], map_location="cpu", weights_only=True, mmap=True)
        tensors: dict[str, Tensor] = content["tensors"]
        return tensors

    def fill_one(path: str, tensor: Tensor) -> Tensor:
        if path not in dims:
            return tensor
        dim = dims[path]
        length = tensor.shape[dim] if dim >= 0 else 0

        def read(start: int, stop: int) -> Tensor:
            parts = []
            for rank in range(len(files)):
                first, end = part_of(length, rank, len(files))
                begin, size = max(start, first), min(stop, end) - max(start, first)
                if size > 0:
                    parts.append(tensors_of(rank)[path].narrow(dim, begin - first, size))
            return torch.cat(parts, dim) if parts else tensors_of(0)[path].narrow(dim, 0, 0).clone()

        return assemble(tensor, dim, read)

    filled: dict[str, Any] = map_tensors(checkpoint, fill_one)
    return filled


def assemble_whole(tensor: Tensor, dim: int, read: Callable[[int, int], Tensor]) -> Tensor:
    """All of a tensor."""
    return read(0, tensor.shape[dim]) if dim >= 0 else tensor


def prune(folder: Path) -> None:
    """Remove what no checkpoint in ``folder`` names; on rank zero only, when none is written."""
    manifests = [manifest.read(path) for path in folder.glob("[!.]*.ckpt")]
    named = {own.shards for own in manifests if own}
    for path in folder.glob("shards-*"):
        if path.name not in named:
            shutil.rmtree(path, ignore_errors=True)
