"""What torch.compile has made, kept beside the checkpoint: a restart elsewhere need not repeat it.

Torch keeps it in a folder of its own, which a new pod does not have. For a CPU it keeps the source
of its C++ code alone, which is compiled again.

Each process of rank zero's node has a file, because code for one GPU is not found for another one.
The processes of other nodes have the same GPUs, and read the same files. Nodes that do not see the
run directory have none, and neither has the copy in a store.
"""

import logging
from pathlib import Path
from typing import Any

import lightning as L
import torch

from samestep.callbacks.checkpoints import Checkpoints
from samestep.ranks import collectives, compat, environment
from samestep.ranks.process_group import gather
from samestep.run.files import open_atomic, read_bytes
from samestep.run_spec import RunSpec

log = logging.getLogger(__name__)


def callback(spec: RunSpec) -> L.Callback | None:
    """``CompiledCode``, if the run keeps files."""
    return CompiledCode() if not spec.saves_nothing else None


class CompiledCode(L.Callback):
    """The code that this process has compiled, kept in the folder of the checkpoints."""

    def __init__(self) -> None:
        self._folder = Path()
        self._num_kept = 0  # bytes of this process that are in its file

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Find what an earlier start has kept."""
        (checkpoints,) = compat.callbacks_of(trainer, Checkpoints)
        self._folder = checkpoints.folder
        if stage == "fit":
            self.restore()

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep what was compiled since the last save of the run; it is not in the checkpoint."""
        writer: Any = trainer.strategy.checkpoint_io
        if writer.saves_for_run:
            self.keep()

    def restore(self) -> None:
        """Hand what was kept to torch, which takes what fits its version, the device and the net.

        These are pickles, as in all caches of torch: nothing but the directory of the run that
        continues is read.
        """
        content = read_bytes(self._path_of(environment.local_rank()))
        # Torch 2.6 lacks the function.
        if content and hasattr(torch.compiler, "load_cache_artifacts"):
            torch.compiler.load_cache_artifacts(content)

    def keep(self) -> None:
        """Write what was compiled since the last call; every rank must call this."""
        # In no other node has a process the same number in its node and in the run.
        is_in_first_node = environment.rank() == environment.local_rank()
        content = read_compiled() if is_in_first_node else b""
        num_bytes = len(content) if len(content) > self._num_kept else 0
        self._num_kept = len(content)
        sizes = gather(num_bytes)
        if environment.rank() != 0:
            if num_bytes:
                collectives.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), 0)
            return
        if num_bytes:
            self._write(0, content)
        for rank, size in enumerate(sizes):
            if rank > 0 and size:
                self._write(rank, receive_bytes(rank, size))

    def _path_of(self, rank: int) -> Path:
        return self._folder / f"compiled-{rank}.bin"

    def _write(self, rank: int, content: bytes) -> None:
        path = self._path_of(rank)
        try:
            with open_atomic(path) as file:
                file.write(content)
        except OSError as error:
            # No step depends on it, and checkpoints say what is wrong with the disk.
            log.warning("%s: %s; a restart compiles again", path, error.strerror)


def read_compiled() -> bytes:
    """All that this process has compiled; empty if that is nothing, or with torch 2.6."""
    if not hasattr(torch.compiler, "save_cache_artifacts"):
        return b""
    artifacts = torch.compiler.save_cache_artifacts()
    return artifacts[0] if artifacts else b""


def receive_bytes(source: int, size: int) -> bytes:
    """What the rank ``source`` sends."""
    arrived = torch.empty(size, dtype=torch.uint8)
    collectives.receive(arrived, source)
    return arrived.numpy().tobytes()
