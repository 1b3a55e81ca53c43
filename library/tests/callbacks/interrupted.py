"""Train in this process, stop by a real SIGTERM in the middle of an epoch, and continue."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from samestep.callbacks.checkpoints import Checkpoints, StopBetweenSteps
from samestep.callbacks.exact import ResumeOrder, SeedSteps
from samestep.ranks import lightning_patches, stopping
from samestep.run.checkpoint import AtomicCheckpointIO


class Learner(L.LightningModule):
    """Learns from the mean of each batch, and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[tuple[int, int, list[float]]] = []
        self.num_validations = 0

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        parts = [part[0] if isinstance(part, (list, tuple)) else part for part in parts]
        x = torch.cat([part.float().reshape(-1, 1) for part in parts])
        self.seen.append((self.current_epoch, batch_idx, x.flatten().tolist()))
        return (self.layer(x) - 0.1 * x).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_validation_end(self) -> None:
        self.num_validations += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Terminate(L.Callback):
    """Sends SIGTERM to this process within one batch."""

    def __init__(self, when: tuple[int, int] | None) -> None:
        self.when = when

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if (trainer.current_epoch, batch_idx) == self.when:
            os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def handling_signals() -> Iterator[None]:
    """Handle signals as a run does, and leave nothing of it to the next test."""
    handlers = {signum: signal.getsignal(signum) for signum in stopping.handled()}
    stopping.install()
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        stopping.allow_interruption(False)


def fit(
    folder: Path,
    make_loaders: Callable[[], Any],
    stops: Sequence[tuple[int, int]] = (),
    *,
    model: Callable[[], Learner] = Learner,
    callbacks: Callable[[], list[L.Callback]] = list,
    seed: int = 0,
    every_s: float = 300,
    **options: Any,
) -> list[Learner]:
    """Train two epochs, with a SIGTERM in each of the batches ``stops``; a model per process."""
    models = []
    for stop in (*stops, None):
        checkpoints = Checkpoints(str(folder / "checkpoints"), every_s)
        trainer = L.Trainer(
            accelerator="cpu", **{"max_epochs": 2} | options, logger=False, num_sanity_val_steps=0,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
            plugins=[AtomicCheckpointIO()],
            callbacks=[
                StopBetweenSteps(checkpoints), SeedSteps(seed), ResumeOrder(seed), *callbacks(),
                checkpoints, Terminate(stop),
            ],
        )  # fmt: skip
        lightning_patches.apply(trainer)
        models.append(model())
        with handling_signals():
            loaders = make_loaders()
            data: dict[str, Any] = {"datamodule": loaders}
            if not isinstance(loaders, L.LightningDataModule):
                data = {"train_dataloaders": loaders, "val_dataloaders": torch.ones(1, 1, 1)}
            path = checkpoints.last if checkpoints.last.exists() else None
            if stop is None:
                trainer.fit(models[-1], **data, ckpt_path=path)
            else:
                with pytest.raises(stopping.Stopped):
                    trainer.fit(models[-1], **data, ckpt_path=path)
    return models


def check_exact(
    tmp_path: Path, make_loaders: Callable[[], Any], *stops: tuple[int, int], **options: Any
) -> tuple[Learner, list[Learner]]:
    """Compare a run that was stopped with one that was not: batches, weights, validations."""
    (whole,) = fit(tmp_path / "whole", make_loaders, **options)
    parts = fit(tmp_path / "stopped", make_loaders, stops, **options)
    assert [batch for part in parts for batch in part.seen] == whole.seen
    assert torch.equal(parts[-1].layer.weight, whole.layer.weight)
    assert sum(part.num_validations for part in parts) == whole.num_validations
    return whole, parts
