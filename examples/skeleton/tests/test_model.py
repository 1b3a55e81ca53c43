"""The model: it learns a line."""

import torch

from examples.skeleton.model import SkeletonModel


def test_it_learns():
    torch.manual_seed(0)
    model = SkeletonModel(hidden_size=16, lr=0.01)
    model.log = lambda *arguments, **options: None
    optimizer = model.configure_optimizers()
    x = torch.randn(64, 10)
    batch = [x, x.sum(1, keepdim=True)]
    losses = []
    for _ in range(100):
        losses.append(model.training_step(batch, 0))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.1 * losses[0]
    assert model(x).shape == (64, 1)
