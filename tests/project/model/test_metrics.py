import pytest
import torch
from torch.nn import functional as F

from project.model.metrics import Sums

CPU = torch.device("cpu")


def filled(logits: torch.Tensor, labels: torch.Tensor, sizes: list[int]) -> Sums:
    sums = Sums()
    for part, truth in zip(logits.split(sizes), labels.split(sizes), strict=True):
        if len(truth):
            sums.update(F.cross_entropy(part, truth), part, truth)
    return sums


@pytest.mark.parametrize("num_classes", [3, 20])
def test_unequal_batches_and_ranks_give_the_figures_of_the_whole(num_classes: int):
    torch.manual_seed(0)
    logits, labels = torch.randn(50, num_classes), torch.randint(num_classes, (50,))
    first, second = filled(logits[:7], labels[:7], [4, 3]), filled(logits[7:], labels[7:], [40, 3])
    ranks = [first, second, Sums()]
    totals = [torch.zeros(4).double() if r._totals is None else r._totals for r in ranks]
    metrics = ranks[0].metrics(CPU, lambda _: torch.stack(totals).sum(0), top5=num_classes > 10)
    assert metrics["loss"].item() == pytest.approx(F.cross_entropy(logits, labels).item())
    assert metrics["accuracy"].item() == pytest.approx(
        (logits.argmax(1) == labels).double().mean().item()
    )
    if num_classes > 10:
        in_top5 = [label in row.topk(5).indices for row, label in zip(logits, labels, strict=True)]
        assert metrics["top5_accuracy"].item() == pytest.approx(sum(in_top5) / 50)
    else:
        assert "top5_accuracy" not in metrics


def test_reading_the_figures_begins_a_new_epoch():
    sums = filled(torch.eye(3), torch.arange(3), [3])
    assert sums.metrics(CPU, lambda t: t, top5=False)["accuracy"] == 1
    sums.update(torch.tensor(1.0), torch.eye(3), torch.tensor([1, 2, 0]))
    assert sums.metrics(CPU, lambda t: t, top5=False)["accuracy"] == 0


def test_a_rank_without_images_takes_part():
    seen = []
    Sums().metrics(CPU, lambda t: seen.append(t) or torch.ones(4), top5=False)
    assert seen[0].tolist() == [0, 0, 0, 0]
