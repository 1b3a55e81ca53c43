"""A clock that counts the work of a device."""

import time

import lightning as L
import torch

WARMUP_BATCHES = 3  # of an epoch; they are not timed
TIMED_BATCHES = 100  # of an epoch, at most: each of them waits for the GPU


def synchronized_time(pl_module: L.LightningModule) -> float:
    """Seconds on a clock, read after the device has finished its queued work."""
    # Kernels run asynchronously: without this, their time would count where a later step waits.
    if pl_module.device.type != "cpu":
        torch.accelerator.synchronize(pl_module.device)
    return time.perf_counter()


class ForwardTimer:
    """Times forward passes of this rank, a hundred in each epoch.

    Without backward passes: there DDP waits for the slowest rank, so all ranks take as long.
    """

    def __init__(self) -> None:
        self.is_running = False
        self._begin = 0.0
        self._seconds = 0.0
        self._samples = 0

    def start(self, pl_module: L.LightningModule, batch_idx: int) -> None:
        """Begin to time the forward pass of this batch, if it is one of those that are timed."""
        # The first batches of an epoch also start loader processes and choose kernels.
        if WARMUP_BATCHES <= batch_idx < WARMUP_BATCHES + TIMED_BATCHES:
            self.is_running = True
            self._begin = synchronized_time(pl_module)

    def stop(self, pl_module: L.LightningModule, num_samples: int) -> None:
        """Count a forward pass that took this many samples."""
        self._seconds += synchronized_time(pl_module) - self._begin
        self._samples += num_samples
        self.is_running = False

    def reset(self) -> float:
        """Samples per second since the last call; 0 if nothing was timed."""
        speed = self._samples / self._seconds if self._seconds else 0.0
        self._seconds = 0.0
        self._samples = 0
        return speed
