"""How a step is taken."""

from itertools import chain

import torch

from .base import Exact, Regressor, Style


class ManuallyAccumulated(Regressor):
    """A step for each three batches."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 3)
        if (batch_idx + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()


class Alternating(Regressor):
    """Each batch is for one of two optimizers."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [
            torch.optim.Adam(layer.parameters(), lr=0.02) for layer in (self.net[0], self.net[2])
        ]

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class ManualSchedule(Alternating):
    """Steps its schedules itself, as Lightning asks of manual optimization."""

    def configure_optimizers(self):
        optimizers = super().configure_optimizers()
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.lr_schedulers()[batch_idx % 2].step()


class LBFGS(Regressor):
    """An optimizer that calls its closure several times."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Twice(Regressor):
    """Calls the closure twice in each step, as sharpness-aware minimization does."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer_closure()
        optimizer.step(closure=optimizer_closure)


class Warmup(Regressor):
    """Warms the rate up in optimizer_step."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, (self.global_step + 1) / 15)


class Clips(Regressor):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val=1 / (1 + self.current_epoch))


class Penalty(Regressor):
    """Changes the gradients in hooks."""

    def on_after_backward(self):
        for parameter in chain(self.net.parameters()):
            parameter.grad.add_(0.01 * parameter.detach().sign())

    def on_before_optimizer_step(self, optimizer):
        self.log("grad_norm", torch.stack([p.grad.norm() for p in self.parameters()]).norm())


STYLES = [
    Style("manual optimization that accumulates", ManuallyAccumulated, Exact),
    Style("two optimizers that alternate", Alternating, Exact, (
        "trainer.strategy=ddp_find_unused_parameters_true",
    )),
    Style("manual schedules", ManualSchedule, Exact, (
        "trainer.strategy=ddp_find_unused_parameters_true",
    )),
    Style("LBFGS", LBFGS, Exact, in_double=True),
    Style("closure called twice", Twice, Exact),
    Style("optimizer_step with warmup", Warmup, Exact),
    Style("gradient_clip_val", Regressor, Exact, ("trainer.gradient_clip_val=0.5",)),
    Style("configure_gradient_clipping", Clips, Exact),
    Style("gradient hooks", Penalty, Exact),
]  # fmt: skip
