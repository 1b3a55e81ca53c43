"""A clock that counts the work of a device."""

import time

import lightning as L
import torch


def synchronized_time(pl_module: L.LightningModule) -> float:
    """Seconds on a clock, read after the device has finished its queued work."""
    # Kernels run asynchronously: without this, their time would count where a later step waits.
    if pl_module.device.type != "cpu":
        torch.accelerator.synchronize(pl_module.device)
    return time.perf_counter()
