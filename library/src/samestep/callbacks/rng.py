"""Random numbers that depend neither on interruptions nor, outside of a step, on the ranks."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.seed import isolate_rng

from samestep.data.seeds import mix_seed, seed_all, seed_others
from samestep.ranks import devices, virtual
from samestep.ranks.compat import callbacks_of

DATA_HOOKS = (
    "prepare_data", "setup", "train_dataloader", "val_dataloader", "test_dataloader",
    "predict_dataloader",
)  # fmt: skip
"""Hooks that choose samples. All of them draw the same numbers, so that a split of the data that is
repeated, such as for the validation or in another stage, is the same split."""
START_HOOKS = (
    "configure_callbacks", "configure_model", "configure_sharded_model", "configure_optimizers",
    "on_fit_start", "on_train_start",
)  # fmt: skip
"""Other hooks of each start. They draw numbers of their own: two parts of a model, made in two
hooks, must not get the same weights."""
EPOCH_HOOKS = "on_train_epoch_start", "on_train_epoch_end"
SEEDED_HOOKS = frozenset((*DATA_HOOKS, *START_HOOKS, *EPOCH_HOOKS))


class SeedSteps(L.Callback):
    """Makes the random numbers of each step a pure function of seed, stage, batch and rank.

    Dropout then samples the same numbers in a run that was interrupted, and so does a step that
    uses NumPy or Python's ``random``, as mixup often does. Each epoch of training samples others.
    Validation and test do not, so that their metrics can be repeated from a checkpoint alone; the
    random numbers of training continue after a validation as if there had been none.

    The hooks around the steps, which prepare data and model, are seeded too, without the rank. What
    they draw is the same in every start and on any number of ranks.

    ``samestep.loops`` seeds a step before its batch is moved to the device, where hooks of the
    module may apply random transforms. ``before_hooks`` seeds the hooks of module,
    DataModule and callbacks.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._training_numbers = ExitStack()  # puts them back

    def seed_hook(self, name: str, epoch: int = 0) -> None:
        """Seed a hook outside of the steps; ``epoch`` is that of the training."""
        # Not by the numbers that were drawn before: prepare_data runs on some ranks only, Lightning
        # seeds several ranks and not one, and a run that resumes skips the sanity check.
        if name in DATA_HOOKS:
            seed_all(mix_seed(self.seed, 0))
        elif name in START_HOOKS:
            seed_all(mix_seed(self.seed, 0, zlib.crc32(name.encode())))
        elif name in EPOCH_HOOKS:
            seed_all(mix_seed(self.seed, epoch, zlib.crc32(name.encode())))

    def seed_step(self, trainer: L.Trainer, batch_idx: int) -> None:
        """Seed the step of this batch of the epoch."""
        self._seed(trainer.current_epoch, batch_idx, virtual.current())

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the random numbers of training, and seed the hooks before the first batch."""
        self._training_numbers.enter_context(isolated_generators())
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
        self._seed(stage, dataloader_idx, batch_idx, virtual.current())

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
        gpu = devices.module_of_gpu()
        if gpu is not None:
            gpu.manual_seed(seed)


@contextmanager
def isolated_generators() -> Iterator[None]:
    """Leave the global generators after this block as they were."""
    # Lightning knows no GPUs of Apple.
    state = torch.mps.get_rng_state() if devices.has_mps() else None
    with isolate_rng():
        yield
    if state is not None:
        torch.mps.set_rng_state(state)


def seed_hook(trainer: L.Trainer, name: str) -> None:
    """Seed a hook of this name, if the Trainer is one of ours."""
    # Asked first: some hooks are called in each step.
    if name not in SEEDED_HOOKS:
        return
    for seeds in callbacks_of(trainer, SeedSteps):
        seeds.seed_hook(name, trainer.current_epoch)


@cache  # once in a process, which may have several runs
def before_hooks(function: Callable[[L.Trainer, str], None]) -> None:
    """Let ``function`` act before each hook that Lightning 2.6 calls, with the hook's name.

    A callback cannot: Lightning calls those of a DataModule before the callbacks', and some hooks
    are of the module alone, such as ``train_dataloader``.
    """

    def wrap(call_hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call_hook)
        def act_and_call(trainer: L.Trainer, name: str, *args: Any, **named: Any) -> Any:
            function(trainer, name)
            return call_hook(trainer, name, *args, **named)

        return act_and_call

    hooks: Any = call
    hooks._call_lightning_datamodule_hook = wrap(hooks._call_lightning_datamodule_hook)
    hooks._call_callback_hooks = wrap(hooks._call_callback_hooks)
    hooks._call_lightning_module_hook = wrap(hooks._call_lightning_module_hook)
