"""What is learned, and how: the loss, the metrics and the optimizer."""

# ruff: noqa: D102  # what each hook is for: Lightning's documentation
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn


class Classifier(L.LightningModule):
    """A net that names the class of an image, trained by cross entropy.

    Batches are images ``[B, C, H, W]``, bytes or numbers from 0 to 1, and labels ``[B]``. Logged
    for each epoch, over all ranks: ``<stage>/loss`` in nats per image, ``<stage>/accuracy``, and
    with more than ten classes ``<stage>/top5_accuracy``.
    """

    def __init__(
        self,
        *,
        net: nn.Module,  # maps normalized images to logits [B, num_classes]
        mean: Sequence[float],  # of the pixels of each channel, from 0 to 1
        std: Sequence[float],
        image_size: int,
        optimizer: Callable[..., torch.optim.Optimizer],  # takes parameter groups
        lr_scheduler: Callable[..., torch.optim.lr_scheduler.LRScheduler],  # and total_steps
        label_smoothing: float,  # share of the target that is spread over all classes
        compile: bool,  # compile the net in place
    ) -> None:
        super().__init__()
        self.net, self.optimizer, self.lr_scheduler = net, optimizer, lr_scheduler
        self.label_smoothing = label_smoothing
        self.example_input_array = torch.zeros(2, len(mean), image_size, image_size).byte()
        # As large as an image: with one number per channel, torch takes ten times as long on a CPU.
        scale = self.example_input_array[0] + 1 / torch.tensor(std).view(-1, 1, 1)
        shift = -torch.tensor(mean).view(-1, 1, 1) * scale
        self.register_buffer("normal", torch.stack([shift, scale]), persistent=False)
        self.build_optimizer(total_steps=100)  # wrong arguments fail here, not after the data
        if compile:  # dynamic code would round by what was compiled before
            net.compile(dynamic=False)

    def forward(self, images: Tensor) -> Any:
        shift, scale = self.get_buffer("normal")
        scale = scale / 255 if images.dtype == torch.uint8 else scale
        pixels = images.to(shift.dtype, copy=True)
        return self.net(torch.addcmul(shift, pixels, scale, out=pixels))

    def score(self, batch: Sequence[Tensor], stage: str, smoothing: float = 0) -> list[Tensor]:
        """Loss and logits of a batch."""
        images, labels = batch
        logits = self(images)
        loss = nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)
        hits = (logits.argmax(1) == labels).to(torch.get_default_dtype())  # never of 16 bits
        values = {f"{stage}/loss": loss, f"{stage}/accuracy": hits.mean()}
        if logits.shape[1] > 10:
            hits = (logits.topk(5).indices == labels[:, None]).any(1).to(torch.get_default_dtype())
            values[f"{stage}/top5_accuracy"] = hits.mean()
        self.log_dict(values, on_step=False, on_epoch=True, sync_dist=True, prog_bar=True)
        return [loss, logits]

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self.score(batch, "train", self.label_smoothing)[0]

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.score(batch, "val")

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The columns of the table of test predictions."""
        logits = self.score(batch, "test")[1]
        return {"truth": batch[1], "probability": logits.softmax(1), "image": batch[0]}

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """The columns that ``samestep predict`` writes."""
        return {"file": batch[1], "probability": self(batch[0]).softmax(1)}

    def configure_optimizers(self) -> Any:
        return self.build_optimizer(self.trainer.estimated_stepping_batches)

    def build_optimizer(self, total_steps: float) -> Any:
        """The optimizer, and a schedule that ends with the last step."""
        optimizer = self.optimizer(self.parameter_groups())
        schedule = self.lr_scheduler(optimizer, total_steps=max(1, total_steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Matrices and kernels decay; norms and biases do not."""
        learned = [p for p in self.net.parameters() if p.requires_grad]
        decay = {"params": [p for p in learned if p.ndim > 1]}
        return [decay, {"params": [p for p in learned if p.ndim <= 1], "weight_decay": 0.0}]
