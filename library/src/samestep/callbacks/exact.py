"""Exact resume for any LightningModule: random numbers, and state of each rank.

Each callback keeps one thing the same on any number of ranks, before and after an interruption.
They are part of every run; the user's module has nothing to remember.
"""

import logging
from contextlib import ExitStack
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric, MetricCollection

from samestep.data.loaders import weights_of_ranks
from samestep.data.seeds import mix_seed, seed_all, seed_others
from samestep.metrics import EpochMean
from samestep.ranks import lightning_patches
from samestep.ranks.process_group import gather
from samestep.ranks.sharded import shard_like

log = logging.getLogger(__name__)


class SeedSteps(L.Callback):
    """Makes the random numbers of each step a pure function of seed, stage, batch and rank.

    Dropout then samples the same numbers in a run that was interrupted, and so does a step that
    uses NumPy or Python's ``random``, as mixup often does. Each epoch of training samples others.
    Validation and test do not, so that their metrics can be repeated from a checkpoint alone; the
    random numbers of training continue after a validation as if there had been none.

    ``samestep.loops`` seeds a step before its batch is moved to the device, where hooks of the
    module may apply random transforms.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._training_numbers = ExitStack()  # puts them back

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Seed what a validation or test on its own does before its first batch."""
        if stage in ("validate", "test"):
            seed_all(mix_seed(self.seed))

    def seed_step(self, trainer: L.Trainer, batch_idx: int) -> None:
        """Seed the step of this batch of the epoch."""
        self._seed(trainer.current_epoch, batch_idx, trainer.global_rank)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the random numbers of training, and seed the hooks before the first batch."""
        self._training_numbers.enter_context(isolate_rng())
        self.on_validation_batch_start(trainer, pl_module, None, -1)

    def on_validation_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Seed this batch of a validation or test."""
        stage = 2 if trainer.testing else 1
        self._seed(stage, dataloader_idx, batch_idx, trainer.global_rank)

    on_test_batch_start = on_validation_batch_start

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the random numbers of training back."""
        self._training_numbers.close()

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Seed the hooks before the first batch."""
        self.on_test_batch_start(trainer, pl_module, None, -1)

    def _seed(self, *numbers: int) -> None:
        seed = mix_seed(self.seed, *numbers)
        # torch.manual_seed would also queue a call, with a stack trace, for GPUs not in use.
        torch.default_generator.manual_seed(seed)
        seed_others(seed)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed(seed)


class RankState(L.Callback):
    """Keeps what each rank has of its own within an epoch, and gives all ranks the same buffers.

    A checkpoint within an epoch holds of each rank: the buffers, such as batch norm's running
    statistics; the ``EpochMean`` metrics; what ``self.log`` and torchmetrics have summed up
    (metrics that the module does not log over several epochs too); and with manual optimization the
    gradients, because only the module knows when it takes a step. On the same
    number of ranks each gets its own state back. On another number buffers and gradients become
    their mean, and rank zero gets all that is summed.

    Before each validation and at the end of each epoch the buffers become their mean over the
    ranks, so that every rank, and the checkpoint, hold the same model. A rank with a larger share
    of the samples counts more.
    """

    def __init__(self) -> None:
        self._saved: list[dict[str, Any]] = []  # of each rank, from a checkpoint
        self._gradients: dict[str, Tensor] = {}  # of all ranks, if they are sharded

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the state of all ranks, each of which must call this."""
        own: dict[str, Any] = {
            "weight": weights_of_ranks(trainer)[trainer.global_rank],
            "sums": {name: sums.state().cpu() for name, sums in sums_of(pl_module).items()},
        }
        if trainer.world_size > 1:
            own["buffers"] = {name: b.cpu() for name, b in float_buffers(pl_module).items()}
        if not pl_module.automatic_optimization:
            gradients = {
                name: parameter.grad
                for name, parameter in pl_module.named_parameters()
                if parameter.grad is not None
            }
            sharded = {name: g for name, g in gradients.items() if isinstance(g, DTensor)}
            # Each is the mean over the ranks already, and saved as the weights are.
            checkpoint["gradients"] = sharded
            own["gradients"] = {
                name: g.cpu() for name, g in gradients.items() if name not in sharded
            }
        # At the end of an epoch nothing logged is left to be continued: Lightning resets it.
        epochs: Any = trainer.fit_loop.epoch_progress.current
        is_within_epoch = epochs.processed < epochs.ready
        own["logs"] = lightning_patches.logs_of_epoch(trainer) if is_within_epoch else {}
        over = set() if is_within_epoch else lightning_patches.ids_of_logged_metrics(trainer)
        own["metrics"] = {
            name: lightning_patches.state_of_metric(metric)
            for name, metric in metrics_of(pl_module).items()
            if metric.update_called and id(metric) not in over
        }
        checkpoint["state_of_ranks"] = gather(own)

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember it until training starts: the strategy still moves the model until then."""
        if trainer.state.fn == "fit":
            self._saved = checkpoint.get("state_of_ranks", [])
            self._gradients = checkpoint.get("gradients", {})

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the state of this rank back."""
        parts, self._saved = self._saved, []
        is_same_number = len(parts) == trainer.world_size
        if is_same_number:
            parts = [parts[trainer.global_rank] | {"weight": 1.0}]
        for name, buffer in float_buffers(pl_module).items():
            if buffers := of_parts(parts, "buffers", name):
                weighted = [part["weight"] * b for part, b in zip(parts, buffers, strict=True)]
                buffer.copy_(mean_of(weighted))
        for name, parameter in pl_module.named_parameters():
            if gradients := of_parts(parts, "gradients", name):
                # A rank without a gradient counts as one with zeros.
                mean = mean_of(gradients) * (len(gradients) / len(parts))
                parameter.grad = shard_like(mean.to(parameter.device), parameter)
            elif name in self._gradients:
                parameter.grad = self._gradients[name].to(parameter.device)
        # What is summed must not be counted twice.
        has_sums = is_same_number or trainer.is_global_zero
        self._continue_sums(trainer, pl_module, parts if has_sums else [])

    def _continue_sums(
        self, trainer: L.Trainer, pl_module: L.LightningModule, parts: list[dict[str, Any]]
    ) -> None:
        for name, sums in sums_of(pl_module).items():
            if totals := of_parts(parts, "sums", name):
                sums.load_state(torch.stack(totals).sum(0))
        lightning_patches.continue_logs(trainer, [part.get("logs", {}) for part in parts])
        for name, metric in metrics_of(pl_module).items():
            try:
                lightning_patches.continue_metric(metric, of_parts(parts, "metrics", name))
            except RuntimeError as error:
                metric.reset()
                log.warning("%s counts the rest of this epoch only: %s", name, error)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Add what was saved to what the batch before has logged."""
        lightning_patches.add_logs_before(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Validate and save the same model on every rank."""
        if trainer.world_size > 1:
            weight = weights_of_ranks(trainer)[trainer.global_rank]
            for buffer in float_buffers(pl_module).values():
                buffer.copy_(trainer.strategy.reduce(weight * buffer, reduce_op="mean"))

    on_train_epoch_end = on_validation_start


def of_parts(parts: list[dict[str, Any]], kind: str, name: str) -> list[Any]:
    """What is called so in the states of some ranks, where they have it."""
    return [part[kind][name] for part in parts if name in part.get(kind, {})]


def mean_of(parts: list[Tensor]) -> Tensor:
    """The mean of tensors of one shape; of one tensor this tensor, bit for bit."""
    return parts[0] if len(parts) == 1 else torch.stack(parts).mean(0)


def sums_of(module: nn.Module) -> dict[str, EpochMean]:
    """Every ``EpochMean`` within a module, by its name there."""
    return {name: part for name, part in module.named_modules() if isinstance(part, EpochMean)}


def float_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of a module that have a mean, by name: no counters, nothing that is empty."""
    return {n: b for n, b in module.named_buffers() if b.is_floating_point() and b.numel()}


def metrics_of(module: nn.Module) -> dict[str, Metric]:
    """Every metric of torchmetrics within a module, by its name there."""
    for part in module.modules():
        if isinstance(part, MetricCollection):
            # Members with equal states update one of them only; reading them brings all up to date.
            list(part.items(keep_base=True, copy_state=False))
    return {name: part for name, part in module.named_modules() if isinstance(part, Metric)}
