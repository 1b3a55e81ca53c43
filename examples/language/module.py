"""How a transformer learns a text: the loss, the metrics and the optimizer."""

# ruff: noqa: D102  # what each hook is for: Lightning's documentation
import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F

from examples.language.net import Transformer
from examples.language.text import NO_TARGET


class LanguageModel(L.LightningModule):
    """A net trained to predict the next character of a text, by cross entropy.

    Logged for each epoch, over all ranks: ``<stage>/loss`` in nats per character, or whatever
    ``unit`` is, and ``<stage>/bits_per_character``.
    """

    def __init__(
        self,
        *,
        net: Transformer,  # maps ids [B, T] to logits [B, T, vocabulary_size]
        optimizer: Callable[..., torch.optim.Optimizer],  # takes parameter groups
        lr_scheduler: Callable[..., torch.optim.lr_scheduler.LRScheduler],  # and total_steps
        unit: str = "character",  # what an id stands for
    ) -> None:
        super().__init__()
        self.net, self.optimizer, self.lr_scheduler = net, optimizer, lr_scheduler
        self.bits = f"bits_per_{unit}"
        self.example_input_array = torch.zeros(2, net.context, dtype=torch.int64)  # for export
        self.build_optimizer(total_steps=100)  # wrong arguments fail here, not after the data

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``[B, T, vocabulary_size]`` of ids ``[B, T]``."""
        logits: Tensor = self.net(ids)
        return logits

    def score(self, batch: Sequence[Tensor], stage: str) -> Tensor:
        """Mean loss of a batch."""
        inputs, targets = batch
        logits = self(inputs).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=NO_TARGET)
        # Training windows are whole. Counting the others makes the CPU wait for the device.
        count = targets.numel() if self.training else int((targets != NO_TARGET).sum())
        values = {f"{stage}/loss": loss, f"{stage}/{self.bits}": loss / math.log(2)}
        of_epoch: Any = {"on_step": False, "on_epoch": True, "sync_dist": True, "prog_bar": True}
        self.log_dict(values, batch_size=count, **of_epoch)
        return loss

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self.score(batch, "train")

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.score(batch, "val")

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.score(batch, "test")

    def configure_optimizers(self) -> Any:
        return self.build_optimizer(self.trainer.estimated_stepping_batches)

    def build_optimizer(self, total_steps: float) -> Any:
        """An optimizer that decays only matrices, and a schedule that ends with the last step."""
        parameters = [*self.net.parameters()]
        decay = {"params": [p for p in parameters if p.ndim > 1]}
        plain = {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}
        optimizer = self.optimizer([decay, plain])
        schedule = self.lr_scheduler(optimizer, total_steps=max(1, total_steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

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
        ids = vocabulary.encode(prompt).tolist()
        for _ in range(length):
            logits = self(torch.tensor([ids[-self.net.context :]], device=self.device))[0, -1]
            # The net may have more ids than the vocabulary, which has no text for them.
            known = logits[vocabulary.first : len(vocabulary)].float().cpu()
            sampled = torch.multinomial((known / temperature).softmax(0), 1, generator=generator)
            ids.append(vocabulary.first + int(sampled))
        return str(vocabulary.decode(ids[-length:]))
