"""What training waits for a save, by those who write in the background: ours, Lightning's, torch's.

Each saves the same weights and state of Adam five times, and is given the time to write between two
saves, in which the weights change. The first save of each begins without memory, and does not
count.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save

from samestep.run.checkpoint import AtomicCheckpointIO

LAYERS = 10
WIDTHS = {"76": 795, "1000": 2885}
"""Of each layer, by the MB of its weights and the state of Adam."""
NUM_SAVES = 5

Save = Callable[[dict[str, Any], Path], Callable[[], object]]
"""Saves a checkpoint to a path; what it returns waits until that is on the disk."""


def ours(size: str) -> dict[str, float]:
    """The IO of every run, and its commit."""
    io = AtomicCheckpointIO()
    io.in_background = True

    def save(checkpoint: dict[str, Any], path: Path) -> Callable[[], object]:
        io.commit()
        io.save_checkpoint(checkpoint, path)
        return io.wait

    return measure(size, save)


def waits(size: str) -> dict[str, float]:
    """torch.save and fsync, while training waits."""

    def save(checkpoint: dict[str, Any], path: Path) -> Callable[[], object]:
        with path.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        return bool

    return measure(size, save)


def lightning(size: str) -> dict[str, float]:
    """AsyncCheckpointIO, which copies each tensor, and leaves the file to a thread."""
    io = AsyncCheckpointIO(TorchCheckpointIO())

    def save(checkpoint: dict[str, Any], path: Path) -> Callable[[], object]:
        io.save_checkpoint(checkpoint, path)
        return io.teardown

    return measure(size, save)


def dcp(size: str) -> dict[str, float]:
    """async_save of torch.distributed.checkpoint, in one process; it writes a folder."""

    def save(checkpoint: dict[str, Any], path: Path) -> Callable[[], object]:
        future: Any = async_save(checkpoint, checkpoint_id=path, no_dist=True)
        return future.result

    return measure(size, save)


def measure(size: str, save: Save) -> dict[str, float]:
    """The seconds of a save after the first, in which nothing else is done."""
    with tempfile.TemporaryDirectory() as folder:
        return {"value": median(time_saves(size, save, Path(folder, "last.ckpt"))[1:])}


def time_saves(size: str, save: Save, path: Path) -> list[float]:
    """The seconds of each save."""
    width = WIDTHS[size]
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(net.parameters())
    seconds: list[float] = []
    for step in range(NUM_SAVES):
        net(torch.randn(2, width)).square().mean().backward()
        optimizer.step()
        checkpoint = {
            "global_step": step,
            "state_dict": net.state_dict(),
            "optimizer_states": [optimizer.state_dict()],
        }
        started = time.perf_counter()
        wait = save(checkpoint, path)
        seconds.append(time.perf_counter() - started)
        wait()
    return seconds
