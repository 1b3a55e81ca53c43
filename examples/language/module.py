"""How a transformer learns a text: the loss, the metrics and the optimizer."""

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfigType, OptimizerLRSchedulerConfig
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from examples.language.net import Transformer
from examples.language.text import NO_TARGET, Batch
from samestep import EpochMean


class LanguageModel(L.LightningModule):
    """A net trained to predict the next character of a text, by cross entropy.

    Logs, once per epoch and over all ranks, with ``<stage>`` one of train, val and test:

    - ``<stage>/loss``: mean cross entropy, in nats per character, or whatever ``unit`` is.
    - ``<stage>/bits_per_character``: the same in bits.

    Args:
        net: maps ids ``[B, T]`` to logits ``[B, T, vocabulary_size]``; its ``context`` is the most
            positions that it takes.
        optimizer: builds the optimizer from parameter groups. Norms are a group of their own,
            without weight decay.
        lr_scheduler: builds the learning-rate schedule from the optimizer and ``total_steps``.
        unit: what an id stands for.

    Raises:
        ValueError, TypeError: if the optimizer or the schedule rejects its arguments.
    """

    def __init__(
        self,
        *,
        net: Transformer,
        optimizer: Callable[[list[dict[str, Any]]], Optimizer],
        lr_scheduler: Callable[..., LRScheduler],
        unit: str = "character",
    ) -> None:
        super().__init__()
        self.bits = f"bits_per_{unit}"
        self.net = net
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.example_input_array = torch.zeros(2, net.context, dtype=torch.int64)  # for an export
        self.train_sums = EpochMean("train", "loss")
        self.val_sums = EpochMean("val", "loss")
        self.test_sums = EpochMean("test", "loss")
        # Wrong arguments are rejected here. Lightning would build these only after the data.
        self.build_optimizer(total_steps=100)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``[B, T, vocabulary_size]`` of ids ``[B, T]``."""
        logits: Tensor = self.net(ids)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean loss of one training batch, a scalar to minimize."""
        return self._score(batch, self.train_sums)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Score one validation batch."""
        self._score(batch, self.val_sums)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Score one test batch."""
        self._score(batch, self.test_sums)

    def on_train_epoch_end(self) -> None:
        """Log the training metrics of the epoch."""
        self._log_means(self.train_sums)

    def on_validation_epoch_end(self) -> None:
        """Log the validation metrics."""
        self._log_means(self.val_sums)

    def on_test_epoch_end(self) -> None:
        """Log the test metrics."""
        self._log_means(self.test_sums)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Build the optimizer, and a schedule that spans the whole run."""
        optimizer, scheduler = self.build_optimizer(int(self.trainer.estimated_stepping_batches))
        schedule: LRSchedulerConfigType = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def build_optimizer(self, total_steps: int) -> tuple[Optimizer, LRScheduler]:
        """An optimizer that decays only matrices, and its schedule."""
        parameters = [*self.net.parameters()]
        decayed = {"params": [p for p in parameters if p.ndim > 1]}
        plain = {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}
        optimizer = self.optimizer([decayed, plain])
        return optimizer, self.lr_scheduler(optimizer, total_steps=total_steps)

    @torch.inference_mode()
    def write(
        self, prompt: str, vocabulary: Any, length: int, temperature: float, seed: int
    ) -> str:
        """Continue a prompt by sampling one character after the other.

        Args:
            prompt: at least one character; the model sees its last ``context`` characters.
            vocabulary: that of the run's data. Only its characters are sampled.
            length: number of characters, or tokens, to sample.
            temperature: 1 samples from the learned distribution; less prefers likely characters.
            seed: of the samples.
        """
        # On the CPU, so that the text does not depend on the device.
        generator = torch.Generator().manual_seed(seed)
        context = self.net.context
        ids = vocabulary.encode(prompt).tolist()
        for _ in range(length):
            logits = self(torch.tensor([ids[-context:]], device=self.device))[0, -1]
            # The net may have more ids than the vocabulary, which has no text for them.
            known = logits[vocabulary.first : len(vocabulary)].float().cpu()
            sampled = torch.multinomial((known / temperature).softmax(0), 1, generator=generator)
            ids.append(vocabulary.first + int(sampled))
        return str(vocabulary.decode(ids[-length:]))

    def _score(self, batch: Batch, sums: EpochMean) -> Tensor:
        logits = self(batch.inputs).flatten(0, 1)
        targets = batch.targets.flatten()
        loss = F.cross_entropy(logits, targets, ignore_index=NO_TARGET, reduction="sum")
        # Training windows are whole. Counting the others makes the CPU wait for the device.
        count = len(targets) if self.training else int((targets != NO_TARGET).sum())
        sums.update(count, loss=loss)
        return loss / count

    def _log_means(self, sums: EpochMean) -> None:
        means = sums.means()
        bits = {f"{sums.stage}/{self.bits}": means[f"{sums.stage}/loss"] / math.log(2)}
        # Equal on all ranks already; sync_dist says so to Lightning.
        self.log_dict(means | bits, sync_dist=True, prog_bar=True)
