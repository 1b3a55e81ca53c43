import pytest
import torch
from torch.nn import functional as F

from project.model.metrics import add_batch, make_sums


@pytest.mark.parametrize("num_classes", [3, 20])
def test_unequal_batches_give_the_metrics_of_the_whole(num_classes: int):
    torch.manual_seed(0)
    logits, labels = torch.randn(50, num_classes), torch.randint(num_classes, (50,))
    sums = make_sums("val", num_classes)
    sizes = [4, 3, 40, 3]
    for part, truth in zip(logits.split(sizes), labels.split(sizes), strict=True):
        add_batch(sums, F.cross_entropy(part, truth), part, truth)
    metrics = sums.means()
    assert metrics["val/loss"].item() == pytest.approx(F.cross_entropy(logits, labels).item())
    right = (logits.argmax(1) == labels).double().mean().item()
    assert metrics["val/accuracy"].item() == pytest.approx(right)
    if num_classes > 10:
        in_top5 = [label in row.topk(5).indices for row, label in zip(logits, labels, strict=True)]
        assert metrics["val/top5_accuracy"].item() == pytest.approx(sum(in_top5) / 50)
    else:
        assert "val/top5_accuracy" not in metrics
