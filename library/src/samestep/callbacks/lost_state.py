"""Finds state that no checkpoint keeps: attributes of Python that change while a run trains."""

import random
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torchmetrics import Metric

from samestep.callbacks.share_out import find_loaders
from samestep.callbacks.sums import Sums

Leaves = list[object]  # the numbers of an attribute, in an order that does not change

LIBRARIES = {"torch", "lightning", "samestep", "torchmetrics", "omegaconf"}
LIBRARIES |= sys.stdlib_module_names
MAX_LEAVES = 1_000  # of an attribute that are compared
MAX_VALUES = 4_096  # of a tensor, spread over all of it
NUM_ENDS = 64  # items at each end of a longer list
MAX_DEPTH = 6  # lists in objects in lists...
NAMED = 8  # attributes that a note names


class LostState(L.Callback):
    """Names once what a run that continues would lose: attributes in no checkpoint.

    It compares the attributes of the module, of its parts, of the DataModule, of the data sets and
    samplers of its DataLoaders, and of the callbacks that are not Lightning's: numbers, tensors,
    arrays, generators of random numbers, and lists, dictionaries and objects of these. It looks at
    them before the first step, after it, and when the second epoch begins: an attribute that has
    another value then, and that no ``state_dict`` holds, is state. A list that is empty between two
    epochs is lost within an epoch only; it is named if training fills it. A class with its own
    ``on_save_checkpoint`` is trusted.

    A checkpoint keeps the names, and a run that continues repeats them before its first step.

    It must be the last callback, so that the others have changed what they change in a step.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        """What was found, such as ``Model.momentum``."""
        self._before: dict[str, Leaves] = {}
        self._unsaved_buffers: list[str] = []
        self._first_epoch = 0
        self._has_stepped = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Note the buffers with ``persistent=False``, before a strategy cuts up the model."""
        buffers, saved = dict(pl_module.named_buffers()), pl_module.state_dict()
        self._unsaved_buffers = [name for name in buffers if name not in saved]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the first values, and repeat what an earlier start has found."""
        if not trainer.is_global_zero:
            return
        if trainer.world_size > 1 and (own := find_own_state(pl_module)):
            print(
                f"Note: checkpoints keep what {briefly(own)} saves on rank zero only. State that "
                "differs between ranks is lost when the run continues: keep it as a buffer",
                flush=True,
            )
        if self.names:
            print(
                "Note: this run continues with the first values of these attributes, because no "
                f"checkpoint holds them: {briefly(self.names)}",
                flush=True,
            )
        self._first_epoch, self._has_stepped = trainer.current_epoch, False
        self._before = self._look(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        """Compare after the first batch."""
        if not self._has_stepped and trainer.is_global_zero:
            self._has_stepped = True
            self._compare(trainer, pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compare once more when the first epoch is over, with its validation."""
        if trainer.current_epoch == self._first_epoch + 1 and trainer.is_global_zero:
            self._compare(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """What was found."""
        return {"names": self.names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember it."""
        self.names = list(state_dict["names"])

    def _compare(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Name what has changed since the start, and was not named before."""
        now = self._look(trainer, pl_module)
        new = [
            name
            for name, leaves in now.items()
            if leaves and leaves != self._before.get(name) and name not in self.names
        ]
        if not new:
            return
        self.names += new
        print(
            f"Note: training changes these attributes, and no checkpoint holds them: "
            f"{briefly(new)}. A run that continues starts with their first values. Keep them by "
            "register_buffer, or by state_dict or on_save_checkpoint of their class",
            flush=True,
        )

    def _look(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Leaves]:
        """Every attribute by its name that no checkpoint holds, and its leaves."""
        buffers = dict(pl_module.named_buffers())
        unsaved = {name: buffers[name] for name in self._unsaved_buffers if name in buffers}
        reader = Reader(trainer, pl_module, unsaved.values())
        found = dict(reader.read_module(pl_module))
        for name, buffer in unsaved.items():
            found[f"{type(pl_module).__name__}.{name}"] = reader.read(buffer)
        others = [*trainer.callbacks, trainer.datamodule]  # type: ignore[attr-defined]
        for owner in others:
            if owner is not None and not is_of_library(owner):
                found.update(reader.read_owner(owner))
        for loader in find_loaders(trainer.train_dataloader):
            # A loader with a state of its own says what it needs.
            if isinstance(loader, DataLoader) and not hasattr(loader, "load_state_dict"):
                found.update(reader.read_loader(loader, trainer.datamodule))  # type: ignore[attr-defined]
        return found


class Reader:
    """Reads the values of attributes, without those that checkpoints hold anyway.

    Args:
        trainer: whose optimizers and schedules checkpoints hold.
        pl_module: whose weights they hold.
        unsaved: its buffers that they do not hold.
    """

    def __init__(
        self, trainer: L.Trainer, pl_module: L.LightningModule, unsaved: Iterable[Tensor]
    ) -> None:
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        kept: list[object] = [*pl_module.modules(), *trainer.optimizers, *schedules]
        self.kept = {id(part) for part in kept}
        weights = [*pl_module.parameters(), *pl_module.buffers()]
        self.weights = {id(weight) for weight in weights} | set(map(place_of, weights)) - {0}
        for buffer in unsaved:
            self.weights -= {id(buffer), place_of(buffer)}

    def read_module(self, module: L.LightningModule) -> Iterator[tuple[str, Leaves]]:
        """The attributes of a module and of all its parts."""
        of_base = vars(L.LightningModule()).keys()
        for path, part in module.named_modules():
            name = ".".join(filter(None, [type(module).__name__, path]))
            if isinstance(part, Metric):
                yield name, self.read(part.metric_state)
            elif part is module or not is_of_library(part):
                saves = saves_itself(part, L.LightningModule if part is module else nn.Module)
                for attribute, value in vars(part).items():
                    if attribute not in of_base and not saves:
                        yield f"{name}.{attribute}", self.read(value)

    def read_owner(self, owner: Any) -> Iterator[tuple[str, Leaves]]:
        """The attributes of a callback or DataModule that its ``state_dict`` does not hold."""
        base: Any = L.Callback if isinstance(owner, L.Callback) else L.LightningDataModule
        hook = getattr(type(owner), "on_save_checkpoint", None)
        if hook is not getattr(base, "on_save_checkpoint", None):
            return
        saved = set(self.read(owner.state_dict()))
        has_library_parent = any(
            is_of_library(parent, itself=True) and not issubclass(base, parent)
            for parent in type(owner).__mro__[1:]
        )
        of_base = vars(base()).keys()
        for attribute, value in vars(owner).items():
            if attribute in of_base or (has_library_parent and attribute.startswith("_")):
                continue
            leaves = self.read(value)
            if not saved.issuperset(leaves):
                yield f"{type(owner).__name__}.{attribute}", leaves

    def read_loader(self, loader: DataLoader[Any], data: Any) -> Iterator[tuple[str, Leaves]]:
        """The attributes of what a DataLoader reads, such as the passes that a data set counts.

        The DataModule may hold them in its ``state_dict``.
        """
        saved = set(self.read(data.state_dict())) if data is not None else set()
        batch_sampler = loader.batch_sampler
        sampler = getattr(batch_sampler, "sampler", None)
        for part in (loader.dataset, loader.sampler, batch_sampler, sampler):
            # Lightning tells a sampler that has ``set_epoch`` the epoch, also after a restart.
            if part is not None and not is_of_library(part) and not hasattr(part, "set_epoch"):
                for attribute, value in getattr(part, "__dict__", {}).items():
                    leaves = self.read(value)
                    if not saved.issuperset(leaves):
                        yield f"{type(part).__name__}.{attribute}", leaves

    def read(self, value: Any) -> Leaves:
        """The numbers in a value; none for what is no state, such as text."""
        leaves: Leaves = []
        self._add(value, leaves, 0)
        return leaves

    def _add(self, value: Any, leaves: Leaves, depth: int) -> None:
        if len(leaves) >= MAX_LEAVES or depth > MAX_DEPTH or id(value) in self.kept:
            return
        if isinstance(value, (bool, int, float, complex, np.generic)):
            leaves.append(repr(value))
        elif isinstance(value, (Tensor, np.ndarray)):
            self._add_array(value, leaves)
        elif isinstance(value, (dict, list, tuple, set, frozenset, deque)):
            items = list(value.values() if isinstance(value, dict) else value)
            if len(items) > 2 * NUM_ENDS:
                leaves.append(repr(len(items)))
                items = [*items[:NUM_ENDS], *items[-NUM_ENDS:]]
            for item in items:
                self._add(item, leaves, depth + 1)
        else:
            self._add_object(value, leaves, depth)

    def _add_array(self, value: Any, leaves: Leaves) -> None:
        if isinstance(value, Tensor):
            if id(value) in self.weights or place_of(value) in self.weights or value.is_meta:
                return
            value = value.detach().flatten()[:: max(1, value.numel() // MAX_VALUES)]
            leaves.append(value.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        elif value.dtype != object:
            step = max(1, value.size // MAX_VALUES)
            leaves.append(value.ravel()[::step].tobytes())

    def _add_object(self, value: Any, leaves: Leaves, depth: int) -> None:
        if isinstance(value, torch.Generator):
            leaves.append(value.get_state().numpy().tobytes())
        elif isinstance(value, np.random.Generator):
            leaves.append(repr(value.bit_generator.state))
        elif isinstance(value, random.Random):
            leaves.append(value.getstate())
        elif isinstance(value, (nn.Module, Optimizer, LRScheduler)):
            # A net in a list or a callback, an optimizer that Lightning does not know.
            self._add(value.state_dict(), leaves, depth + 1)
        elif isinstance(value, (Namespace, SimpleNamespace)) or (
            hasattr(value, "__dict__") and not is_of_library(value)
        ):
            self._add(vars(value), leaves, depth + 1)


def is_of_library(value: Any, *, itself: bool = False) -> bool:
    """Whether the class of ``value``, or ``value`` itself, is of a library that we know."""
    kind = value if itself else type(value)
    return str(kind.__module__).partition(".")[0] in LIBRARIES


def saves_itself(part: nn.Module, base: type) -> bool:
    """Whether a part of the model says itself what a checkpoint holds of it."""
    hooks = ("on_save_checkpoint", "state_dict", "get_extra_state")
    return isinstance(part, Sums) or any(
        getattr(type(part), hook, None) is not getattr(base, hook, None) for hook in hooks
    )


def place_of(tensor: Tensor) -> int:
    """Where a plain tensor lies in memory, which its views share; otherwise 0."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
        return 0
    return tensor.untyped_storage().data_ptr()


def find_own_state(module: nn.Module) -> list[str]:
    """The methods with which a model and its parts write state of their own into a checkpoint."""
    extra = {
        f"{type(part).__name__}.get_extra_state"
        for part in module.modules()
        # LightningModules and metrics have their own, which is not state of the training.
        if type(part).get_extra_state is not nn.Module.get_extra_state
        and type(part).__module__.partition(".")[0] not in LIBRARIES
    }
    if is_overridden("on_save_checkpoint", module):
        extra.add(f"{type(module).__name__}.on_save_checkpoint")
    return sorted(extra)


def briefly(names: list[str]) -> str:
    """The names in a sentence."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
