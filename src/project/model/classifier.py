"""What is learned, and how: the loss, the metrics and the optimizer."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfigType, OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from project.data.images import Batch
from project.model.metrics import add_batch, make_sums
from samestep.errors import ConfigError
from samestep.metrics import EpochMean


class ImageClassifier(L.LightningModule):
    """A network trained to name the class of an image, by cross entropy.

    Logs, once per epoch and over all ranks, with ``<stage>`` one of train, val and test:

    - ``<stage>/loss``: mean cross entropy, in nats per image. Guessing gives ``log(num_classes)``.
    - ``<stage>/accuracy``: fraction of images whose highest logit is the right class, 0 to 1.
    - ``<stage>/top5_accuracy``: fraction whose right class is among the five highest logits;
      only with more than ten classes.
    - ``test/accuracy_<class>``: fraction of the images of one class that were recognized.

    The metrics are exact on any number of ranks, also when their shares are unequal.

    Args:
        net: maps images ``[B, C, H, W]`` to logits ``[B, num_classes]``.
        num_classes: number of classes.
        optimizer: builds the optimizer from parameter groups, such as
            ``functools.partial(torch.optim.SGD, lr=0.1)``. Norms and biases are a group of their
            own, without weight decay.
        lr_scheduler: builds the learning-rate schedule from the optimizer and ``total_steps``.
            It steps once per optimizer step and ends with the last one.
        label_smoothing: share of the training target spread over all classes, 0 to 1.
        compile: compile the net in place, which leaves the keys of checkpoints as they are.
        backbone_lr: learning rate of ``net.backbone``; None: that of the rest.

    Raises:
        ValueError, TypeError: if the optimizer or the schedule rejects its arguments.
    """

    def __init__(
        self,
        *,
        net: nn.Module,
        num_classes: int,
        optimizer: Callable[[list[dict[str, Any]]], Optimizer],
        lr_scheduler: Callable[..., LRScheduler],
        label_smoothing: float,
        compile: bool,
        backbone_lr: float | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.num_classes = num_classes
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.label_smoothing = label_smoothing
        self.backbone_lr = backbone_lr
        self.train_sums = make_sums("train", num_classes)
        self.val_sums = make_sums("val", num_classes)
        self.test_sums = make_sums("test", num_classes)
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64)
        """Test images by class (rows) and guess (columns), over all ranks once tested."""
        # Wrong arguments are rejected here. Lightning would build these only after the data.
        self.build_optimizer(total_steps=100)
        if compile:
            self.net.compile()

    @property
    def metric_names(self) -> list[str]:
        """What is logged each epoch, so that a misspelt ``monitor`` is rejected at the start."""
        return [f"{s.stage}/{name}" for s in (self.train_sums, self.val_sums) for name in s.names]

    def setup(self, stage: str) -> None:
        """Raise a ConfigError if the data have another number of classes: the test would fail."""
        of_data = getattr(self.trainer.datamodule, "num_classes", self.num_classes)  # type: ignore[attr-defined]
        if of_data != self.num_classes:
            raise ConfigError(
                f"model.num_classes={self.num_classes}: the data have data.num_classes={of_data}; "
                "leave model.num_classes out, it follows the data"
            )

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[B, num_classes]`` of images ``[B, C, H, W]``."""
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of one training batch, a scalar to minimize."""
        loss, _ = self._score(batch, self.train_sums, self.label_smoothing)
        return loss

    def on_train_epoch_end(self) -> None:
        """Log the training metrics of the epoch."""
        self._log_means(self.train_sums)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Score one validation batch."""
        self._score(batch, self.val_sums)

    def on_validation_epoch_end(self) -> None:
        """Log the validation metrics."""
        self._log_means(self.val_sums)

    def on_test_start(self) -> None:
        """Begin a new confusion matrix."""
        self.confusion = torch.zeros(self.num_classes**2, dtype=torch.int64, device=self.device)

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Score one test batch, and return its logits ``[B, num_classes]``."""
        _, logits = self._score(batch, self.test_sums)
        cells = batch.labels * self.num_classes + logits.argmax(1)
        self.confusion += cells.bincount(minlength=self.num_classes**2)
        return logits

    def on_test_epoch_end(self) -> None:
        """Log the test metrics, of all images and of each class."""
        self._log_means(self.test_sums)
        counts: Tensor = self.trainer.strategy.reduce(self.confusion, reduce_op="sum")
        self.confusion = counts.reshape(self.num_classes, self.num_classes).cpu()
        accuracies = self.confusion.diag() / self.confusion.sum(1)
        names = self.trainer.datamodule.class_names  # type: ignore[attr-defined]
        for name, accuracy in zip(names, accuracies, strict=True):
            if not accuracy.isnan():  # a class without test images has no accuracy
                self.log(f"test/accuracy_{name}", accuracy.to(self.device), sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Build the optimizer, and a schedule that spans the whole run."""
        optimizer, scheduler = self.build_optimizer(int(self.trainer.estimated_stepping_batches))
        schedule: LRSchedulerConfigType = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def build_optimizer(self, total_steps: int) -> tuple[Optimizer, LRScheduler]:
        """An optimizer that decays only matrices and kernels, and its schedule."""
        parameters = [p for p in self.net.parameters() if p.requires_grad]
        parts: list[tuple[list[Any], dict[str, Any]]] = [(parameters, {})]
        if self.backbone_lr is not None:
            backbone = list(self.net.get_submodule("backbone").parameters())
            others = set(parameters) - set(backbone)
            head = [p for p in parameters if p in others]
            parts = [(head, {}), (backbone, {"lr": self.backbone_lr})]
        groups = []
        for part, options in parts:
            groups.append({"params": [p for p in part if p.ndim > 1], **options})
            plain = [p for p in part if p.ndim <= 1]
            groups.append({"params": plain, "weight_decay": 0.0, **options})
        optimizer = self.optimizer(groups)
        if not optimizer.defaults.get("weight_decay"):  # each group costs kernels of its own
            optimizer = self.optimizer([{"params": part, **options} for part, options in parts])
        return optimizer, self.lr_scheduler(optimizer, total_steps=total_steps)

    def _score(
        self, batch: Batch, sums: EpochMean, label_smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Loss and logits ``[B, num_classes]`` of a batch, which ``sums`` counts.

        Raises:
            ConfigError: at the first batch, before any step, if the net has other outputs.
        """
        logits: Tensor = self(batch.images)
        if logits.shape[1:] != (self.num_classes,):
            raise ConfigError(
                f"model.net: {type(self.net).__name__} gives logits {list(logits.shape)}, and must "
                f"give [{len(batch.images)}, {self.num_classes}] for "
                f"model.num_classes={self.num_classes}"
            )
        loss = F.cross_entropy(logits, batch.labels, label_smoothing=label_smoothing)
        if len(batch.labels):  # the last batch may hold no image for this rank
            add_batch(sums, loss, logits, batch.labels)
        return loss, logits

    def _log_means(self, sums: EpochMean) -> None:
        # Equal on all ranks already; sync_dist says so to Lightning.
        self.log_dict(sums.means(), sync_dist=True, prog_bar=True)
