"""LightningModules as the documentation of each library writes them."""

import copy
from functools import partial
from typing import Any

import lightly.loss
import lightning as L
import segmentation_models_pytorch as smp
import timm
import torch
import torchmetrics
from ema_pytorch import EMA
from kornia import augmentation
from lightly.models.utils import deactivate_requires_grad, update_momentum
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from pytorch_metric_learning import losses, miners
from schedulefree import AdamWScheduleFree
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn import functional as F
from torch_ema import ExponentialMovingAverage
from torch_geometric.nn import GCNConv, global_mean_pool
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup
from vector_quantize_pytorch import VectorQuantize

from ..base import Regressor


class Classifier(Regressor):
    """Three kinds of pictures of 16 x 16; with MixUp the labels of training are probabilities."""

    def make_net(self) -> Any:
        return nn.Sequential(nn.Flatten(), nn.Linear(256, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        # Not those of a slow copy or an average.
        return torch.optim.SGD(self.net.parameters(), lr=self.lr, momentum=0.9)


class Graphs(Classifier):
    """Two layers of a graph network; the batch is an object."""

    def make_net(self):
        return nn.ModuleList([GCNConv(5, 8), GCNConv(8, 8), nn.Linear(8, 1)])

    def loss(self, batch):
        first, second, head = self.net
        x = first(batch.x, batch.edge_index).relu()
        x = second(x, batch.edge_index)
        return F.mse_loss(head(global_mean_pool(x, batch.batch)), batch.y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, batch_size=batch.num_graphs, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), batch_size=batch.num_graphs, sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), batch_size=batch.num_graphs, sync_dist=True)


class Monai(Classifier):
    """A small UNet; its loss and its metric are MetaTensors."""

    def __init__(self):
        super().__init__()
        self.dice = DiceCELoss(sigmoid=True)
        self.metric = DiceMetric(include_background=True)

    def make_net(self):
        return UNet(2, 1, 1, channels=(4, 8), strides=(2,))

    def loss(self, batch):
        return self.dice(self.net(batch["image"]), batch["label"])

    def validation_step(self, batch, batch_idx):
        guess = self.net(batch["image"])
        self.metric(guess > 0, batch["label"])
        self.log("val_loss", self.dice(guess, batch["label"]), sync_dist=True)

    def on_validation_epoch_end(self):
        self.log("val_dice", self.metric.aggregate().item(), sync_dist=True)
        self.metric.reset()


class Bert(Classifier):
    """Groups of parameters, and a linear schedule with warmup for each step."""

    def make_net(self) -> Any:
        config = BertConfig(
            vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return BertForSequenceClassification(config)

    def loss(self, batch):
        tokens, labels = batch
        return self.net(input_ids=tokens, labels=labels).loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        total = self.trainer.estimated_stepping_batches
        schedule = get_linear_schedule_with_warmup(optimizer, 4, total)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Lora(Bert):
    """Trains adapters, and keeps nothing else in a checkpoint."""

    def make_net(self):
        config = LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
        return get_peft_model(super().make_net(), config)

    def __init__(self):
        super().__init__()
        self.strict_loading = False

    def on_save_checkpoint(self, checkpoint):
        adapters = get_peft_model_state_dict(self.net).keys()
        weights = checkpoint["state_dict"]
        trained = [name for name, value in self.named_parameters() if value.requires_grad]
        assert len(trained) == len(adapters)
        checkpoint["state_dict"] = {name: weights[name] for name in trained}

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=0.01)


class Timm(Classifier):
    """Batch norm, an average of the weights, and a schedule that is none of torch's."""

    def __init__(self):
        super().__init__()
        self.average = ModelEmaV3(self.net, decay=0.9).requires_grad_(False)

    def make_net(self):
        return timm.create_model("test_resnet", num_classes=3, in_chans=1)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.average.module(x), y), sync_dist=True)

    def optimizer_step(self, *args, **options):
        super().optimizer_step(*args, **options)
        self.average.update(self.net)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.net.parameters(), lr=self.lr)
        schedule = CosineLRScheduler(optimizer, t_initial=3, warmup_t=1, warmup_lr_init=0.001)
        return [optimizer], [{"scheduler": schedule, "interval": "epoch"}]

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(epoch=self.current_epoch)


class Triplets(Classifier):
    """A loss that compares the samples of a batch, and a miner that chooses among them."""

    def __init__(self):
        super().__init__()
        self.miner, self.compare = miners.MultiSimilarityMiner(), losses.TripletMarginLoss()

    def loss(self, batch):
        x, y = batch
        found = self.net(x)
        return self.compare(found, y, self.miner(found, y))


class Remembers(Classifier):
    """A queue of earlier samples, which a plain attribute counts."""

    def __init__(self):
        super().__init__()
        self.compare = losses.CrossBatchMemory(losses.NTXentLoss(), 3, memory_size=16)

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.compare(self.net(x), y)


class WithTeacher(Classifier):
    """Trains against a slow copy of the net, which follows it."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net)
        deactivate_requires_grad(self.teacher)
        self.compare = self.make_comparison()

    def training_step(self, batch, batch_idx):
        update_momentum(self.net, self.teacher, m=0.9)
        return super().training_step(batch, batch_idx)


class MoCo(WithTeacher):
    """A memory of what the slow copy has seen, which only training compares with."""

    def make_comparison(self):
        return lightly.loss.NTXentLoss(memory_bank_size=(16, 3))

    def loss(self, batch):
        x, _ = batch
        pair = self.net(x), self.teacher(x.flip(2))
        return self.compare(*pair) if self.training else F.mse_loss(*pair)


class Dino(WithTeacher):
    """Outputs of the slow copy are centred by a running mean, also in a validation."""

    def make_comparison(self):
        return lightly.loss.DINOLoss(output_dim=3, warmup_teacher_temp_epochs=2)

    def loss(self, batch):
        views = [batch[0], batch[0].flip(2)]
        taught = [self.teacher(view) for view in views]
        return self.compare(taught, [self.net(view) for view in views], epoch=self.current_epoch)


class Segments(Classifier):
    """A decoder with batch norm, and a loss of the whole batch."""

    def __init__(self):
        super().__init__()
        self.dice = smp.losses.DiceLoss("binary")

    def make_net(self):
        return smp.Unet(
            "timm-mobilenetv3_small_minimal_100", encoder_weights=None, encoder_depth=3,
            decoder_channels=(8, 8, 4), in_channels=1,
        )  # fmt: skip

    def loss(self, batch):
        x, y = batch
        return self.dice(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        guess = self.net(x).sigmoid()
        counts = smp.metrics.get_stats(guess, y.long(), mode="binary", threshold=0.5)
        self.log("val_loss", -smp.metrics.iou_score(*counts, reduction="micro"))


class ScheduleFree(Regressor):
    """An optimizer with two sets of weights, for training and for evaluation."""

    def configure_optimizers(self):
        return AdamWScheduleFree(self.parameters(), lr=0.02)

    def on_train_epoch_start(self):
        self.optimizers().train()

    def on_validation_model_eval(self):
        super().on_validation_model_eval()
        self.optimizers().eval()

    def on_validation_model_train(self):
        super().on_validation_model_train()
        self.optimizers().train()

    def on_save_checkpoint(self, checkpoint):
        assert checkpoint["optimizer_states"]


class Quantized(Classifier):
    """A codebook of running means."""

    def __init__(self):
        super().__init__()
        self.codebook = VectorQuantize(dim=8, codebook_size=4, decay=0.9)
        self.decoder = nn.Linear(8, 256)

    def make_net(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(256, 8))

    def loss(self, batch):
        x, _ = batch
        code, _, commitment = self.codebook(self.net(x)[:, None])
        return F.mse_loss(self.decoder(code[:, 0]), x.flatten(1)) + commitment.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class TorchEma(Regressor):
    """An average that is no module: an attribute with lists of tensors."""

    def __init__(self):
        super().__init__()
        # Not in on_fit_start, which Lightning calls after on_load_checkpoint.
        self.average = ExponentialMovingAverage(self.net.parameters(), decay=0.9)

    def on_before_zero_grad(self, optimizer):
        self.average.update()

    def validation_step(self, batch, batch_idx):
        with self.average.average_parameters():
            super().validation_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["average"] = self.average.state_dict()

    def on_load_checkpoint(self, checkpoint):
        self.average.load_state_dict(checkpoint["average"])


class EmaPytorch(Regressor):
    """An average as a submodule, which counts its steps in buffers."""

    def __init__(self):
        super().__init__()
        self.average = EMA(self.net, beta=0.9, update_every=2, update_after_step=3)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.update()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.mse_loss(self.average(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=self.lr, momentum=0.9)


class Augmented(Classifier):
    """Kornia's layers of random transforms, on the device."""

    def __init__(self):
        super().__init__()
        self.augment = nn.Sequential(
            augmentation.RandomHorizontalFlip(p=0.5), augmentation.RandomRotation(10.0)
        )

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return (self.augment(x), y) if self.trainer.training else batch


class Running(Regressor):
    """Metrics that count in Python."""

    def __init__(self):
        super().__init__()
        self.window = torchmetrics.RunningMean(window=7)
        self.tracker = torchmetrics.MetricTracker(torchmetrics.MeanSquaredError(), maximize=False)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.window(loss.detach())
        self.log("window", self.window.compute())
        return loss

    def on_validation_epoch_start(self):
        self.tracker.increment()

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        x, y = batch
        self.tracker.update(self.net(x), y)

    def on_validation_epoch_end(self):
        best, which = self.tracker.best_metric(return_step=True)
        self.log_dict({"best_error": best, "best_check": float(which)})


class Template(L.LightningModule):
    """As that of the common Hydra template: partials for the optimizer, metrics as objects."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = partial(torch.optim.Adam, lr=0.01)
        self.scheduler = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=1)
        self.criterion = nn.MSELoss()
        self.train_error, self.val_error = (torchmetrics.MeanSquaredError() for _ in range(2))
        self.test_error = torchmetrics.MeanSquaredError()
        self.train_loss, self.val_loss, self.test_loss = (
            torchmetrics.MeanMetric() for _ in range(3)
        )
        self.val_best = torchmetrics.MinMetric()

    def model_step(self, batch):
        x, y = batch
        guess = self.net(x)
        return self.criterion(guess, y), guess, y

    def on_train_start(self):
        self.val_loss.reset()
        self.val_error.reset()
        self.val_best.reset()

    def training_step(self, batch, batch_idx):
        loss, guess, y = self.model_step(batch)
        self.train_loss(loss)
        self.train_error(guess, y)
        self.log("train_loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train_error", self.train_error, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, guess, y = self.model_step(batch)
        self.val_loss(loss)
        self.val_error(guess, y)
        self.log("val_loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val_error", self.val_error, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self):
        self.val_best(self.val_error.compute())
        self.log("val_best", self.val_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch, batch_idx):
        loss, guess, y = self.model_step(batch)
        self.test_loss(loss)
        self.test_error(guess, y)
        self.log("test_loss", self.test_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("test_error", self.test_error, on_step=False, on_epoch=True, prog_bar=True)

    def configure_optimizers(self):
        optimizer = self.optimizer(params=self.parameters())
        schedule = {"scheduler": self.scheduler(optimizer), "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}
