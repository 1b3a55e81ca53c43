"""What is counted to judge a classifier."""

from torch import Tensor

from samestep.metrics import EpochMean

TOP5_FROM = 11  # classes; with fewer, five guesses say little


def make_sums(stage: str, num_classes: int) -> EpochMean:
    """Sums of loss and accuracy over an epoch; of top-5 accuracy too, with many classes."""
    names = ["loss", "accuracy"]
    if num_classes >= TOP5_FROM:
        names.append("top5_accuracy")
    return EpochMean(stage, *names)


def add_batch(sums: EpochMean, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
    """Add one batch to the sums of an epoch.

    Args:
        sums: as ``make_sums`` gave them.
        loss: mean cross entropy of the batch, a scalar.
        logits: ``[B, num_classes]``.
        labels: int64 ``[B]``.
    """
    count, logits = len(labels), logits.detach()
    scores = {"loss": loss.detach() * count, "accuracy": (logits.argmax(1) == labels).sum()}
    if "top5_accuracy" in sums.names:
        scores["top5_accuracy"] = (logits.topk(5).indices == labels[:, None]).any(1).sum()
    sums.update(count, **scores)
