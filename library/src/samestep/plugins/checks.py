"""Rejects what could not resume exactly, or would be wrong without anybody noticing.

``check_supported`` names callbacks of Lightning, ``check_accumulation`` a loader that cuts steps
differently than the Trainer, ``Checks`` training samples that are chosen again and otherwise, and
ranks that train different models.
"""

import zlib
from collections.abc import Callable
from functools import cache, wraps
from itertools import compress
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    OnExceptionCheckpoint,
    ProgressBar,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DistributedSampler, Subset

from samestep.arguments import as_list
from samestep.callbacks.display import ShowsProgress
from samestep.callbacks.notes import join_names, print_note
from samestep.callbacks.run_state import Part, Saved
from samestep.data.loaders import find_batch_loaders, find_loaders, orders_of
from samestep.errors import ConfigError, RunError
from samestep.option_names import setting
from samestep.plugin import Given, Plugin
from samestep.ranks import compat
from samestep.ranks.devices import sum_of_bits
from samestep.ranks.process_group import gather
from samestep.ranks.strategies import is_sharded
from samestep.run.weights import find_misfits
from samestep.run_spec import RunSpec

UNSUPPORTED: dict[type[L.Callback], str] = {
    LearningRateFinder: "it trains before the run begins, and again each time the run resumes; "
    "find the rate in a script of your own, and set it in the configuration of the model",
    BatchSizeFinder: "it trains before the run begins, and again each time the run resumes; "
    "find the size in a script of your own, and set it in the configuration of the data",
    StochasticWeightAveraging: "no checkpoint holds its averaged weights, so they are not tested; "
    "use lightning.pytorch.callbacks.WeightAveraging or EMAWeightAveraging",
    ModelPruning: "a run cannot resume from a checkpoint of a pruned model; prune the weights of a "
    "finished run",
    OnExceptionCheckpoint: "Lightning would start the next run from its file; "
    "Checkpoints saves what is needed to resume",
    SpikeDetection: "its state cannot be saved (Lightning 2.6); LossGuard watches the gradients",
}


def check_supported(callback: L.Callback, name: str) -> None:
    """Reject a callback with which a run could not resume exactly; ``name`` is its key."""
    # A subclass inherits what makes its parent unsupported.
    for kind, why in UNSUPPORTED.items():
        if isinstance(callback, kind):
            raise ConfigError(f"{name}: {kind.__name__} is not supported: {why}")


def check_accumulation(trainer: L.Trainer, pl_module: L.LightningModule) -> None:
    """Reject a BatchLoader that cuts a step into more batches than the Trainer accumulates.

    A loader that does not cut steps gives ``batch_size`` samples in each accumulated batch.
    """
    # With manual optimization only the module knows when it takes a step.
    if not pl_module.automatic_optimization:
        return
    numbers = {trainer.accumulate_grad_batches}
    for scheduler in compat.callbacks_of(trainer, GradientAccumulationScheduler):
        numbers |= set(scheduler.scheduling.values())
    accumulated = ", ".join(map(str, sorted(numbers)))
    for loader in find_batch_loaders(trainer.train_dataloader):
        cut = loader.order.batches_per_step
        if cut > 1 and numbers != {cut}:
            raise ConfigError(
                f"the training data: BatchLoader(accumulate_grad_batches={cut}) must be that of "
                f"the Trainer, which accumulates {accumulated}: "
                "BatchLoader(accumulate_grad_batches=self.trainer.accumulate_grad_batches)"
            )


class UnequalWeightsError(RunError):
    """The ranks have trained different models."""

    is_final = True


NOTE_ON_SUBSETS = (
    "Note: the training data are other samples than before the interruption: what was validated "
    "may be trained on. They are chosen by random numbers that nothing has seeded; build "
    "samestep.Trainer first, which seeds them, or use random_split(generator=...)"
)


FIXED: dict[str, tuple[Any, str]] = {
    "barebones": (False, "a run needs its callbacks and its history"),
    "overfit_batches": (0, "it replaces the order of the data; use limit_train_batches"),
    "reload_dataloaders_every_n_epochs": (0, "an interrupted epoch needs its own loader"),
}
"""Arguments of Lightning's Trainer that can have no other value than this one, or None, and why."""


def change(given: Given) -> Given:
    """The arguments as they are, if a run can have them.

    Raises:
        ConfigError: if one of them is not supported.
    """
    for name, (needed, why) in FIXED.items():
        value = given.options.get(name)
        if value not in (None, needed):
            raise ConfigError(f"{setting(name, value)}: is not supported: {why}")
    own = as_list(given.callbacks)
    bars = compat.of_kind(own, ProgressBar)
    if bars and any(isinstance(callback, ShowsProgress) for callback in own):
        raise ConfigError(
            f"callbacks: leave out {type(bars[0]).__name__}; Progress draws a bar already"
        )
    for callback in own:
        check_supported(callback, "callbacks")
    reject_tuner()
    return given


@cache  # once in a process, which may have several runs
def reject_tuner() -> None:
    """Let the methods of Lightning's Tuner raise an error with a Trainer of a run.

    Before they call the Trainer: on several ranks that of Lightning 2.6 is a traceback.
    """

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def raise_or_call(tuner: Any, *args: Any, **options: Any) -> Any:
            if isinstance(getattr(tuner._trainer, "spec", None), RunSpec):
                raise tuner_error(name)
            return call(tuner, *args, **options)

        return raise_or_call

    for name in ("lr_find", "scale_batch_size"):
        setattr(Tuner, name, wrap(name, getattr(Tuner, name)))


def tuner_error(method: str) -> ConfigError:
    """The error of a method of Lightning's Tuner that is called with a Trainer of a run."""
    return ConfigError(
        f"Tuner.{method}: is not supported with samestep.Trainer: it trains before the run begins, "
        "and again each time the run resumes; call it before, with another Trainer: "
        f"Tuner(lightning.Trainer()).{method}(model, ...)"
    )


def callback(spec: RunSpec) -> L.Callback:
    """``Checks``, which every run has."""
    return Checks()


class Checks(Plugin, Part):
    """Ends a run before its first step, or before its ranks save what only one of them has.

    - A module may bring callbacks that a run cannot have.
    - A ``random_split`` before the Trainer is made has numbers of its own in each start and on each
      rank. In hooks of a DataModule, and after the Trainer, it is seeded.
    - A checkpoint holds the weights of rank zero: where the ranks have different ones, the others
      would silently continue with weights that they have not trained. Sharded weights are one for
      all ranks.
    """

    key = "subsets"

    def __init__(self) -> None:
        self._saved: list[int | None] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check the callbacks that the module itself has brought.

        Raises:
            ConfigError: if one of them is not supported.
        """
        for callback in compat.callbacks_of(trainer, L.Callback):
            check_supported(callback, f"{type(pl_module).__name__}.configure_callbacks")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compare the samples with those of other ranks and of earlier starts.

        Raises:
            ConfigError: if the ranks, which get slices of the same batches, have chosen others; or
                if a BatchLoader cuts steps into other parts than the Trainer accumulates.
        """
        check_accumulation(trainer, pl_module)
        choices = choices_of(trainer)
        of_ranks = gather(choices)
        if of_ranks.count(of_ranks[0]) < len(of_ranks):
            raise ConfigError(
                "the training data: the ranks have chosen different samples, by random numbers "
                "that nothing has seeded; build samestep.Trainer first, which seeds them, or use "
                "random_split(generator=...)"
            )
        saved, self._saved = self._saved, []
        if len(saved) != len(choices):
            return
        for before, now in zip(saved, choices, strict=True):
            if before is not None and now is not None and before != now:
                print_note(trainer, NOTE_ON_SUBSETS)
                return

    def save(self, trainer: L.Trainer, checkpoint: dict[str, Any]) -> list[int | None]:
        """Keep which samples are chosen, also by training."""
        return choices_of(trainer)

    def load(self, trainer: L.Trainer, checkpoint: dict[str, Any], saved: Saved) -> None:
        """Remember them until the loaders exist."""
        self._saved = saved.own

    def find_problem(self, trainer: L.Trainer, checkpoint: dict[str, Any]) -> str | None:
        """Why the model could not load its own weights."""
        return find_unloadable(trainer.lightning_module, checkpoint)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Compare one number for each parameter.

        Raises:
            UnequalWeightsError: with the names of the parameters that differ.
        """
        has_replicas = isinstance(trainer.strategy, DDPStrategy) or is_sharded(trainer.strategy)
        if trainer.world_size == 1 or not has_replicas:
            return
        replicated = {n: p for n, p in pl_module.named_parameters() if not isinstance(p, DTensor)}
        if not replicated:
            return
        # Stacked, so that the device is read once and not for each parameter.
        sums = torch.stack([*map(sum_of_bits, replicated.values())])
        of_ranks = torch.tensor(gather(sums.tolist()))
        differs = (of_ranks != of_ranks[0]).any(0).tolist()
        unequal = list(compress(replicated, differs))
        if unequal:
            raise UnequalWeightsError(
                f"the ranks have different weights before step {trainer.global_step} is saved: "
                f"{join_names(unequal)}. The model changes them without DDP: by gradients "
                "of one rank (loss.backward() instead of self.manual_backward(loss), a parameter "
                "that is added while the run trains), by random numbers of one rank, or by a step "
                "that only some ranks take"
            )


def choices_of(trainer: L.Trainer) -> list[int | None]:
    """A number for the samples that each training loader has; None where ranks may differ."""
    choices = []
    loaders = find_loaders(trainer.train_dataloader)
    for loader, order in zip(loaders, orders_of(trainer), strict=True):
        # Otherwise ranks may have chosen samples of their own on purpose.
        sampler = getattr(loader, "sampler", None)
        is_shared = order is not None or isinstance(sampler, DistributedSampler)
        is_same = is_shared or trainer.world_size == 1
        choices.append(digest_of_choice(loader) if is_same else None)
    return choices


def digest_of_choice(loader: Any) -> int | None:
    """A number for the samples that the subsets of a loader choose; None if there is no subset."""
    digest: int | None = None
    data = getattr(loader, "dataset", None)
    # A subset may be of a subset, or within a data set that transforms its samples.
    while data is not None:
        if isinstance(data, Subset):
            chosen = np.asarray(data.indices)
            digest = zlib.crc32(chosen.tobytes(), digest or 0)
        data = getattr(data, "dataset", None)
    return digest


def find_unloadable(model: L.LightningModule, checkpoint: dict[str, Any]) -> str | None:
    """Why a model could not load a checkpoint that it has just made, as a message; None if it can.

    Hooks that save the trainable weights only are many, and Lightning finds out when the run is to
    continue. Nothing is loaded here: hooks of the user may have effects.
    """
    has_hook = is_overridden("on_load_checkpoint", model, L.LightningModule)
    if has_hook or not model.strict_loading:
        return None
    misfits = find_misfits(checkpoint.get("state_dict", {}), model)
    # Code that may mend it gets the benefit of the doubt: to reject what works is worse than to be
    # late.
    certain = (why for key, why in misfits if not has_own_loading(model, key))
    misfit = next(certain, None)
    if misfit is None:
        return None
    name = type(model).__name__
    return (
        f"{name} could not load its own checkpoints, so the run could not continue: {misfit}. Save "
        "all weights in on_save_checkpoint, or restore them in on_load_checkpoint; or set "
        f"self.strict_loading = False in {name}.__init__, if it has the others from elsewhere"
    )


def has_own_loading(model: nn.Module, key: str) -> bool:
    """Whether code outside of torch takes part in loading this key of a ``state_dict``.

    torch 2.15 says in no public attribute which hooks a module has.
    """
    if any(part._load_state_dict_post_hooks for part in model.modules()):
        return True
    # What loads a module can change what its parts find.
    part: nn.Module | None = model
    for child in key.split("."):
        if part is None:
            break
        if part._load_state_dict_pre_hooks:
            return True
        for name in ("load_state_dict", "_load_from_state_dict", "set_extra_state"):
            if not getattr(part, name).__module__.startswith("torch."):
                return True
        part = dict(part.named_children()).get(child)
    return False
