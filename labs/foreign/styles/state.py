"""State that is not in the weights."""

from itertools import cycle

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from .base import DRAWS, LOST, NO_MEAN, Exact, Regressor, Style, table


class Truncated(Regressor):
    """A recurrent net that takes its hidden state from batch to batch."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)
        self.hidden = torch.zeros(1, 3)

    def make_net(self):
        return nn.GRUCell(5, 3)

    def loss(self, batch):
        x, y = batch
        before = self.hidden if self.training else torch.zeros(1, 3)
        hidden = self.net(x, before.expand(len(x), 3))
        if self.training:
            self.hidden = hidden.mean(0, keepdim=True).detach()
        return F.mse_loss(self.head(hidden), y)


class MomentumAsFloat(Regressor):
    """A running mean that scales the loss, as a plain number."""

    def __init__(self):
        super().__init__()
        self.running = 1.0

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.running = 0.9 * self.running + 0.1 * float(loss)
        return loss / (1 + self.running)


class InTheCheckpoint(MomentumAsFloat):
    """The same, saved as Lightning asks."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["running"] = self.running

    def on_load_checkpoint(self, checkpoint):
        self.running = checkpoint["running"]


class Buffered(Regressor):
    """The same as a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running", torch.ones(()))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.running.mul_(0.9).add_(0.1 * loss.detach())
        return loss / (1 + self.running)


class NotPersistent(Buffered):
    """A buffer that state_dict leaves out."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running", torch.ones(()), persistent=False)


class ExtraState(MomentumAsFloat):
    """The same in torch's own way."""

    def get_extra_state(self):
        return {"running": self.running}

    def set_extra_state(self, state):
        self.running = state["running"]


class Curriculum(Exact):
    """A DataModule with a state."""

    def __init__(self):
        super().__init__()
        self.level = 0

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if not self.trainer.training:
            return batch
        self.level += 1
        x, y = batch
        return x * (1 + 0.01 * self.level), y

    def state_dict(self):
        return {"level": self.level}

    def load_state_dict(self, state):
        self.level = state["level"]


class Forgotten(Curriculum):
    """The same without its state."""

    state_dict = Exact.state_dict
    load_state_dict = Exact.load_state_dict


class OwnGenerator(Regressor):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss((x + 0.1 * torch.randn(x.shape, generator=self.generator), y))


class Unlabeled(Regressor):
    """Takes the batches of a second loader one by one."""

    def __init__(self):
        super().__init__()
        self.batches = None

    def training_step(self, batch, batch_idx):
        if self.batches is None:
            self.batches = cycle(DataLoader(table(20, 3), batch_size=4))
        x, _ = next(self.batches)
        return self.loss(batch) + self.net(x).square().mean()


STYLES = [
    Style("hidden state of an RNN as an attribute", Truncated, Exact, told=NO_MEAN),
    Style("running mean as a float", MomentumAsFloat, Exact, told=NO_MEAN),
    Style("running mean by on_save_checkpoint", InTheCheckpoint, Exact, told=NO_MEAN),
    Style("running mean as a buffer", Buffered, Exact, told=NO_MEAN),
    Style("running mean, non-persistent", NotPersistent, Exact, told=NO_MEAN),
    Style("running mean by get_extra_state", ExtraState, Exact, told=NO_MEAN),
    Style("DataModule with a state", Regressor, Curriculum),
    Style("DataModule that forgets its state", Regressor, Forgotten, told=LOST),
    Style("generator of the module", OwnGenerator, Exact, told=DRAWS),
    Style("iterator of the module", Unlabeled, Exact, told=LOST),
]  # fmt: skip
