"""What ``fit`` does and finds before a run begins: data, tests, weights of 64 bit.

What only Lightning finds, while it trains, becomes the same one message by ``user_errors``.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.compile import _maybe_unwrap_optimized
from lightning.pytorch.utilities.model_helpers import is_overridden

from samestep.callbacks.rng import seed_hook
from samestep.data.loaders import find_loaders
from samestep.errors import ConfigError, RunError
from samestep.option_names import option, setting
from samestep.ranks import environment
from samestep.ranks.process_group import on_all_ranks

HOOKS = ("prepare_data", "setup")


def set_precision(model: L.LightningModule, precision: Any) -> None:
    """Make the weights 64 bit with ``precision="64-true"``, before a checkpoint is loaded.

    Lightning 2.6 would load it into 32 bits, and make them 64 bits afterwards. Shorter weights lose
    nothing in 32 bits.
    """
    if precision == "64-true":
        model.double()


def set_up_data(trainer: L.Trainer, data: L.LightningDataModule | None) -> None:
    """Open the data; every rank must call this, and gets the same error.

    Lightning does so when training begins, and then the run has begun.

    Raises:
        ConfigError: if the DataModule rejects a setting.
        RunError: if the data are missing or damaged: exit code 2, unless the error says otherwise.
    """
    if data is None:
        return
    data.trainer = trainer
    prepares = environment.local_rank() == 0
    if not data.prepare_data_per_node:
        prepares = environment.rank() == 0

    def prepare() -> None:
        if prepares and is_overridden("prepare_data", data):
            seed_hook(trainer, "prepare_data")
            data.prepare_data()

    def set_up() -> None:
        seed_hook(trainer, "setup")
        with user_errors(option("data")):
            data.setup("fit")

    try:
        # No rank opens the data before all nodes have them.
        on_all_ranks(prepare)
        on_all_ranks(set_up)
    except RunError as error:
        if error.is_final is None:
            # Data that are missing now would be missing at the next try too.
            error.is_final = True
        raise


@contextmanager
def already_set_up(data: L.LightningDataModule | None) -> Iterator[None]:
    """Let Lightning's first call of each set-up hook within this block do nothing.

    ``set_up_data`` has called them. A second set-up may sample another split, or read for long.
    """
    if data is None:
        yield
        return

    def skip_once(name: str) -> None:
        def skip(*args: Any, **kwargs: Any) -> None:
            vars(data).pop(name, None)

        setattr(data, name, skip)

    skipped = [name for name in HOOKS if is_overridden(name, data)]
    for name in skipped:
        skip_once(name)
    try:
        yield
    finally:
        for name in skipped:
            vars(data).pop(name, None)


def has_test(model: L.LightningModule, data: L.LightningDataModule | None) -> bool:
    """Whether there is something to test: a ``test_step``, and a ``test_dataloader``.

    The loader is the DataModule's, or without one the model's.
    """
    if not is_overridden("test_step", model, L.LightningModule):
        return False
    if data is not None:
        return is_overridden("test_dataloader", data, L.LightningDataModule)
    return is_overridden("test_dataloader", model, L.LightningModule)


def check_limit_of_test(
    trainer: L.Trainer, model: L.LightningModule, data: L.LightningDataModule | None
) -> None:
    """Raise a ConfigError if a share of the test batches is none: Lightning does after training."""
    limit = trainer.limit_test_batches
    if not 0 < limit < 1:
        return
    if data is not None:
        # It may split the data again, also those of the training.
        seed_hook(trainer, "setup")
        data.setup("test")
    name = setting("limit_test_batches", limit)
    for loader in find_loaders((model if data is None else data).test_dataloader()):
        try:
            num_batches = len(loader)
        except TypeError:
            raise ConfigError(
                f"{name}: the number of test batches is unknown; use a whole number"
            ) from None
        if int(num_batches * limit) == 0:
            raise ConfigError(
                f"{name}: selects none of the {num_batches} test batches; use a larger share, or "
                "a whole number"
            )


@contextmanager
def user_errors(name: str) -> Iterator[None]:
    """Turn what Lightning raises for a wrong setting into a ConfigError; ``name`` is its start."""
    try:
        yield
    except MisconfigurationException as error:
        raise ConfigError(f"{name}: {error}") from error
    except (ValueError, RuntimeError) as error:
        message = explain(error)
        if message is None:
            raise
        raise ConfigError(message) from error


def explain(error: Exception) -> str | None:
    """The message for an error of Lightning or torch whose cause is a setting; otherwise None.

    All ranks raise these.
    """
    text = str(error)
    if text.startswith("Early stopping conditioned on metric"):
        return f"{option('EarlyStopping.monitor')}: {text}"
    # Lightning's own text goes on with two remedies.
    found = re.search(r"`val_check_interval` \((\d+)\) must be .* batches \((\d+)\)", text)
    if found:
        interval, num_batches = found.groups()
        return (
            f"{setting('val_check_interval', interval)}: must be at most the {num_batches} batches "
            "of an epoch"
        )
    return None


def unwrap_compiled(model: Any) -> L.LightningModule:
    """The LightningModule in what ``torch.compile`` has made of one; its steps stay compiled.

    Lightning 2.6 has no public function that takes both kinds, and changes the module in place.
    """
    # Unwrapped twice, its compiled methods would be compiled again.
    is_unwrapped = getattr(getattr(model, "_orig_mod", None), "_compiler_ctx", None) is not None
    return model._orig_mod if is_unwrapped else _maybe_unwrap_optimized(model)
