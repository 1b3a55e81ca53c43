"""What is learned, and how: the loss, the metrics and the optimizer."""

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfigType, OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics.classification import MulticlassConfusionMatrix

from project.data.images import Batch, FileBatch
from project.model.normalize import Normalize
from project.model.weight_decay import make_optimizer
from samestep import ConfigError, EpochMean

TOP5_FROM = 11  # classes; with fewer, five guesses say little


class ImageClassifier(L.LightningModule):
    """A network trained to name the class of an image, by cross entropy.

    Logs, once per epoch and over all ranks, with ``<stage>`` one of train, val and test:

    - ``<stage>/loss``: mean cross entropy, in nats per image. Guessing gives ``log(num_classes)``.
    - ``<stage>/accuracy``: fraction of images whose highest logit is the right class, 0 to 1.
    - ``<stage>/top5_accuracy``: fraction whose right class is among the five highest logits;
      only with more than ten classes.
    - ``test/accuracy_<class>``: fraction of the images of one class that were recognized.

    Args:
        normalize: gives the bytes of images zero mean and unit variance.
        net: maps normalized images ``[B, C, H, W]`` to logits ``[B, num_classes]``.
        num_classes: number of classes.
        optimizer: builds the optimizer from parameter groups, such as
            ``functools.partial(torch.optim.SGD, lr=0.1)``. Norms and biases are a group of their
            own, without weight decay.
        lr_scheduler: builds the learning-rate schedule from the optimizer and ``total_steps``.
            It steps once per optimizer step and ends with the last one.
        label_smoothing: share of the training target spread over all classes, 0 to 1.
        compile: compile the net in place, which leaves the keys of checkpoints as they are.

    Raises:
        ValueError, TypeError: if the optimizer or the schedule rejects its arguments.
    """

    def __init__(
        self,
        *,
        normalize: Normalize,
        net: nn.Module,
        num_classes: int,
        optimizer: Callable[[list[dict[str, Any]]], Optimizer],
        lr_scheduler: Callable[..., LRScheduler],
        label_smoothing: float,
        compile: bool,
    ) -> None:
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing={label_smoothing}: must be at least 0 and below 1")
        self.normalize = normalize
        self.net = net
        self.num_classes = num_classes
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.label_smoothing = label_smoothing
        names = ["loss", "accuracy"]
        if num_classes >= TOP5_FROM:
            names.append("top5_accuracy")
        self.train_metrics = EpochMean("train", *names)
        self.val_metrics = EpochMean("val", *names)
        self.test_metrics = EpochMean("test", *names)
        self.test_confusion = MulticlassConfusionMatrix(num_classes, validate_args=False)
        # What ``samestep export`` traces: uint8 images [B, C, H, W].
        self.example_input_array = torch.zeros(2, *normalize.scale.shape, dtype=torch.uint8)
        # Wrong arguments are rejected here. Lightning would build these only after the data.
        self.build_optimizer(total_steps=100)
        if compile:
            # With dynamic shapes the code for a batch depends on what was compiled before: a test
            # after training rounded in another way on a GPU than the same test on its own.
            self.net.compile(dynamic=False)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[B, num_classes]`` of images, uint8 ``[B, C, H, W]``."""
        logits: Tensor = self.net(self.normalize(images))
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of one training batch, a scalar to minimize."""
        loss, _ = self.score(batch, self.train_metrics, self.label_smoothing)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Score one validation batch."""
        self.score(batch, self.val_metrics)

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Score one test batch, and return its logits ``[B, num_classes]``."""
        _, logits = self.score(batch, self.test_metrics)
        self.test_confusion.update(logits, batch.labels)
        return logits

    def predict_step(self, batch: FileBatch, batch_idx: int) -> dict[str, Any]:
        """The columns that ``samestep predict`` writes; probabilities are ``[B, num_classes]``."""
        return {"file": batch.files, "probability": self(batch.images).softmax(1)}

    def score(
        self, batch: Batch, metrics: EpochMean, label_smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Mean loss and logits ``[B, num_classes]`` of a batch, which ``metrics`` counts."""
        images, labels, _ = batch
        logits = self(images)
        if logits.shape[1:] != (self.num_classes,):
            raise ConfigError(
                f"model.net: {type(self.net).__name__} gives logits {list(logits.shape)}, and must "
                f"give [{len(images)}, {self.num_classes}] for model.num_classes={self.num_classes}"
            )
        loss = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
        count = len(labels)
        if count == 0:  # a rank may get no image of the last batch
            return loss, logits
        guesses = logits.detach()
        hits = guesses.argmax(1) == labels
        # As the loss is, so that one kernel copies both: exact for up to 16 million images.
        sums = {"loss": loss.detach() * count, "accuracy": hits.sum(dtype=torch.float32)}
        if "top5_accuracy" in metrics.names:
            sums["top5_accuracy"] = (guesses.topk(5).indices == labels[:, None]).any(1).sum()
        metrics.update(count, **sums)
        return loss, logits

    def on_train_epoch_end(self) -> None:
        """Log the training metrics of the epoch."""
        self.log_dict(self.train_metrics.means(), sync_dist=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        """Log the validation metrics."""
        self.log_dict(self.val_metrics.means(), sync_dist=True, prog_bar=True)

    def on_test_epoch_end(self) -> None:
        """Log the test metrics, of all images and of each class."""
        self.log_dict(self.test_metrics.means(), sync_dist=True, prog_bar=True)
        confusion = self.test_confusion.compute()  # images by class and guess, over all ranks
        self.test_confusion.reset()
        accuracies = confusion.diag() / confusion.sum(1)
        names = self.trainer.datamodule.class_names  # type: ignore[attr-defined]
        for name, accuracy in zip(names, accuracies, strict=True):
            if not accuracy.isnan():  # a class without test images has no accuracy
                self.log(f"test/accuracy_{name}", accuracy, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Build the optimizer, and a schedule that spans the whole run."""
        total_steps = self.trainer.estimated_stepping_batches
        if math.isinf(total_steps):
            raise ConfigError(
                "trainer.max_epochs=-1: the learning-rate schedule must know where the run ends; "
                "set trainer.max_epochs or trainer.max_steps"
            )
        optimizer, scheduler = self.build_optimizer(int(total_steps))
        schedule: LRSchedulerConfigType = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def build_optimizer(self, total_steps: int) -> tuple[Optimizer, LRScheduler]:
        """The optimizer, and the schedule of its learning rate over ``total_steps``."""
        optimizer = make_optimizer(self.optimizer, self.parameter_groups())
        return optimizer, self.lr_scheduler(optimizer, total_steps=total_steps)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What is learned; a subclass may give parts of the net another learning rate."""
        return [{"params": [p for p in self.net.parameters() if p.requires_grad]}]
