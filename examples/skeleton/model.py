"""A model to start from: replace it by your own."""

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

# ruff: noqa: D102  # what each hook is for: Lightning's documentation


class SkeletonModel(L.LightningModule):
    """A net with one hidden layer, trained by the squared error."""

    def __init__(self, hidden_size: int, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(10, hidden_size), nn.ReLU(), nn.Linear(hidden_size, 1))
        self.example_input_array = torch.zeros(2, 10)  # what `samestep export` traces

    def forward(self, x: Tensor) -> Tensor:
        progress: Tensor = self.net(x)
        return progress

    def step(self, batch: list[Tensor], stage: str) -> Tensor:
        x, y = batch  # [B, 10] and [B, 1]
        loss = F.mse_loss(self(x), y)
        self.log(f"{stage}/loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.step(batch, "train")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.step(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.step(batch, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)
