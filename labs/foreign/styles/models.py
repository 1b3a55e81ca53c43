"""What a model is and computes."""

from argparse import Namespace
from enum import Enum
from pathlib import Path

import lightning as L
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F

from .base import DRAWS, NORMALIZES, Exact, Regressor, Style


class GAN(L.LightningModule):
    """Manual optimization of two optimizers, a picture for the logger."""

    def __init__(self, latent: int = 3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(latent, 5), nn.Linear(5, 1)

    def training_step(self, batch):
        x, _ = batch
        opt_g, opt_d = self.optimizers()
        z = torch.randn(len(x), self.hparams.latent).type_as(x)
        self.toggle_optimizer(opt_g)
        g_loss = F.softplus(-self.discriminator(self.generator(z))).mean()
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.toggle_optimizer(opt_d)
        fake = self.discriminator(self.generator(z).detach())
        d_loss = F.softplus(-self.discriminator(x)).mean() + F.softplus(fake).mean()
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)

    def configure_optimizers(self):
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=0.01, betas=(0.5, 0.999))
        return [opt_g, torch.optim.Adam(self.discriminator.parameters(), lr=0.01)], []

    def on_train_epoch_end(self):
        grid = torch.rand(3, 8, 8)
        self.logger.experiment.add_image("generated", grid, self.current_epoch)


class VAE(Regressor):
    """Samples in each step, also in those of the test."""

    def make_net(self):
        return nn.ModuleDict({"encoder": nn.Linear(5, 4), "decoder": nn.Linear(2, 5)})

    def loss(self, batch):
        x, _ = batch
        mean, log_var = self.net["encoder"](x).chunk(2, 1)
        z = mean + (0.5 * log_var).exp() * torch.randn_like(mean)
        kl = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1).mean()
        return F.mse_loss(self.net["decoder"](z), x) + 0.1 * kl

    def on_validation_epoch_end(self):
        self.logger.experiment.add_image("decoded", torch.rand(3, 8, 8), self.global_step)


class Output(dict):
    """As Transformers' ModelOutput."""

    __getattr__ = dict.__getitem__


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.LayerNorm = nn.Linear(5, 8), nn.LayerNorm(8)
        self.classifier = nn.Linear(8, 1)

    def forward(self, x, labels):
        hidden = self.LayerNorm(torch.tanh(self.layer(x)))
        logits = self.classifier(hidden)
        return Output(loss=F.mse_loss(logits, labels), logits=logits)


class Transformer(Regressor):
    """Named groups of parameters, and a linear schedule with warmup."""

    def make_net(self):
        return Encoder()

    def loss(self, batch):
        return self.net(*batch).loss

    def configure_optimizers(self):
        named = list(self.net.named_parameters())
        no_decay = ("bias", "LayerNorm.weight")
        groups = [
            {"params": [p for n, p in named if is_bare is any(w in n for w in no_decay)],
             "weight_decay": 0.0 if is_bare else 0.01}
            for is_bare in (False, True)
        ]  # fmt: skip
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        total = self.trainer.estimated_stepping_batches

        def rate(step: int) -> float:
            return step / 4 if step < 4 else max(0.0, (total - step) / (total - 4))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 1}]


class BatchNorm(Regressor):
    def make_net(self):
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


class Dropout(Regressor):
    def __init__(self):
        super().__init__(lr=0.005)  # with the usual one it diverges

    def make_net(self):
        return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Linear(8, 1))


class Compiled(Regressor):
    def make_net(self):
        return torch.compile(super().make_net(), backend="eager")


class Sparse(Regressor):
    def make_net(self):
        return nn.Embedding(10, 1, sparse=True)

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self.net((x[:, 0].abs() * 3).long().clamp(max=9)), y)

    def configure_optimizers(self):
        return torch.optim.SparseAdam(list(self.parameters()), lr=0.05)


class Frozen(Regressor):
    """Fine-tuning of the last layer."""

    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.02)


class Unused(Regressor):
    """A head that is trained in every other step only."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(5, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx % 2:
            return F.mse_loss(self.other(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)


class Mode(Enum):
    FAST = "fast"


class Hyperparameters(Regressor):
    """Saves whatever it was given."""

    def __init__(self, root=Path("data"), args=Namespace(width=8), mode=Mode.FAST):  # noqa: B008
        super().__init__()
        self.save_hyperparameters()


class ModuleHyperparameter(Regressor):
    def __init__(self, encoder: nn.Module = nn.Linear(5, 5)):  # noqa: B008
        super().__init__()
        self.save_hyperparameters()
        self.encoder = encoder

    def loss(self, batch):
        x, y = batch
        return super().loss((self.encoder(x), y))


class ImportedAsPl(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self.layer(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class PlData(pl.LightningDataModule):
    setup = Exact.setup
    train_dataloader, val_dataloader = Exact.train_dataloader, Exact.val_dataloader


class Untested(Regressor):
    test_step = L.LightningModule.test_step


class Unvalidated(Regressor):
    validation_step = L.LightningModule.validation_step


class Predicts(Regressor):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self.net(batch[0])


TWICE = "trainer.strategy=ddp_find_unused_parameters_true"
STYLES = [
    Style("GAN: manual, two optimizers, add_image", GAN, Exact, (
        "callbacks.checkpoints.monitor=g_loss", TWICE,
    ), DRAWS),
    Style("VAE: stochastic test_step, add_image", VAE, Exact, told=DRAWS),
    Style("outputs, groups, warmup in the style of Transformers", Transformer, Exact),
    Style("batch norm", BatchNorm, Exact, told=NORMALIZES),
    Style("dropout", Dropout, Exact, told=DRAWS),
    Style("torch.compile", Compiled, Exact),
    Style("sparse embedding", Sparse, Exact),
    Style("frozen layers", Frozen, Exact),
    Style("unused parameters", Unused, Exact, (TWICE,)),
    Style("hyperparameters: Path, Namespace, Enum", Hyperparameters, Exact),
    Style("hyperparameters: nn.Module", ModuleHyperparameter, Exact),
    Style("import pytorch_lightning as pl", ImportedAsPl, PlData),
    Style("no test", Untested, Exact),
    Style("no validation", Unvalidated, Exact, ("callbacks.checkpoints.monitor=train_loss",)),
    Style("predict_step", Predicts, Exact),
    Style("bf16-mixed", Regressor, Exact, ("trainer.precision=bf16-mixed",)),
    Style("64-true", Regressor, Exact, ("trainer.precision=64-true",)),
]  # fmt: skip
