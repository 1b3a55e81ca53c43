"""Models that generate, and mixtures of experts."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import samestep

from .base import DRAWN, GATHER, Shape, TaskOf, mlp, numbers, table, with_noise


def vae_of(net: Any, x: Tensor, noise: Tensor) -> Tensor:
    mean, log_variance = net["encoder"](x).chunk(2, 1)
    found = net["decoder"](mean + (log_variance / 2).exp() * noise)
    kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
    return F.mse_loss(found, x) + 0.1 * kl.mean()


def autoencoder() -> nn.Module:
    return nn.ModuleDict({"encoder": mlp(4, 4), "decoder": mlp(2, 4)})


def vae(net: Any, batch: Any) -> Tensor:
    x, _ = batch
    return vae_of(net, x, torch.randn(len(x), 2, dtype=x.dtype))


def vae_drawn(net: Any, batch: Any) -> Tensor:
    x, _, noise = batch
    return vae_of(net, x, noise)


def diffusion_of(net: Any, x: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    share = times.sigmoid()[:, None]
    noisy = share.sqrt() * x + (1 - share).sqrt() * noise
    return F.mse_loss(net(torch.cat([noisy, times[:, None]], 1)), noise)


def denoiser() -> nn.Module:
    return mlp(5, 4)


def diffusion(net: Any, batch: Any) -> Tensor:
    x, _ = batch
    return diffusion_of(net, x, torch.randn_like(x), torch.randn_like(x[:, 0]))


def diffusion_drawn(net: Any, batch: Any) -> Tensor:
    x, _, noise, times = batch
    return diffusion_of(net, x, noise, times)


class Codes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(4, 2), mlp(2, 4)
        self.codes = nn.Parameter(torch.randn(6, 2))


def vq_vae(net: Any, batch: Any) -> Tensor:
    x, _ = batch
    found = net.encoder(x)
    code = net.codes[torch.cdist(found, net.codes).argmin(1)]
    image = net.decoder(found + (code - found).detach())
    commitment = F.mse_loss(found, code.detach())
    return F.mse_loss(image, x) + F.mse_loss(code, found.detach()) + 0.25 * commitment


class Experts(nn.Module):
    """Three experts, of which a router chooses one for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList([mlp(4, 1) for _ in range(3)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.router(x).softmax(1)
        outputs = torch.stack([expert(x)[:, 0] for expert in self.experts], 1)
        chosen = F.one_hot(p.argmax(1), 3)
        return (p * chosen * outputs).sum(1), p


def balance_of(p: Tensor) -> Tensor:
    """The share of samples of each expert times its mean probability (Switch Transformer)."""
    shares = F.one_hot(p.argmax(1), 3).to(p).mean(0)
    return 3 * (shares * p.mean(0)).sum()


def experts(net: Any, batch: Any) -> Tensor:
    x, y = batch
    preds, p = net(x)
    return F.mse_loss(preds, y) + 0.1 * balance_of(p)


def experts_gathered(net: Any, batch: Any) -> Tensor:
    x, y = batch
    preds, p = net(x)
    return F.mse_loss(preds, y) + 0.1 * balance_of(samestep.gather_batch(p))


class GAN(L.LightningModule):
    """Two optimizers, which the module calls itself, and a gradient penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = mlp(2, 4), mlp(4, 1)

    def noise(self, batch: Any) -> tuple[Tensor, Tensor]:
        x = batch[0]
        return torch.randn(len(x), 2, dtype=x.dtype), torch.rand(len(x), 1, dtype=x.dtype)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0]
        z, shares = self.noise(batch)
        opt_g, opt_d = self.optimizers()
        fake = self.generator(z).detach()
        between = (shares * x + (1 - shares) * fake).requires_grad_()
        scores = self.discriminator(between).sum()
        (slopes,) = torch.autograd.grad(scores, between, create_graph=True)
        penalty = (slopes.norm(dim=1) - 1).square().mean()
        d_loss = F.softplus(-self.discriminator(x)).mean()
        d_loss = d_loss + F.softplus(self.discriminator(fake)).mean() + 10 * penalty
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.toggle_optimizer(opt_g)
        g_loss = F.softplus(-self.discriminator(self.generator(z))).mean()
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss}, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        parts = self.generator, self.discriminator
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in parts]


class DrawnGAN(GAN):
    def noise(self, batch: Any) -> tuple[Tensor, Tensor]:
        _, _, z, shares = batch
        return z, shares.sigmoid()


class Critic(L.LightningModule):
    """The critic of a WGAN, whose weights are clipped."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.draws = draws
        self.critic, self.generator = mlp(4, 1), mlp(2, 4).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        z = torch.randn(len(x), 2, dtype=x.dtype) if self.draws else batch[2]
        loss = self.critic(self.generator(z)).mean() - self.critic(x).mean()
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        super().optimizer_step(*args, **options)
        for parameter in self.critic.parameters():
            parameter.data.clamp_(-0.3, 0.3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.critic.parameters(), lr=0.1)


SHAPES = (
    Shape(
        "VAE", table, TaskOf(autoencoder, vae),
        DRAWN, TaskOf(autoencoder, vae_drawn), with_noise(table, (2,)), draws=True,
    ),
    Shape("VQ-VAE", table, TaskOf(Codes, vq_vae)),
    Shape(
        "diffusion", table, TaskOf(denoiser, diffusion),
        DRAWN, TaskOf(denoiser, diffusion_drawn), with_noise(table, (4,), ()), draws=True,
    ),
    Shape(
        "GAN with gradient penalty, two optimizers", table, GAN,
        DRAWN, DrawnGAN, with_noise(table, (2,), (1,)), is_manual=True, draws=True,
    ),
    Shape(
        "WGAN critic", table, lambda: Critic(draws=True),
        DRAWN, lambda: Critic(draws=False), with_noise(table, (2,)), draws=True,
    ),
    Shape(
        "mixture of experts, load balancing", numbers, TaskOf(Experts, experts),
        GATHER, TaskOf(Experts, experts_gathered),
    ),
)  # fmt: skip
