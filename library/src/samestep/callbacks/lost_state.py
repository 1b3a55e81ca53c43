"""Finds state that no checkpoint keeps: attributes of Python that change while a run trains."""

import random
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
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
from samestep.data.sampler import WrappedBatches
from samestep.ranks.lightning_patches import callbacks_of
from samestep.ranks.sharded import class_of

Leaves = list[object]  # the numbers of an attribute, in an order that does not change
Attribute = tuple[str, Any, Any]  # its name and value, and what a checkpoint holds of its owner

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
    them before the first step, after it, and after the first step of the second epoch: an attribute
    that has another value then, and that no ``state_dict`` holds, is state. A list that is empty
    between two epochs is lost within an epoch only; it is named if training fills it. A class with
    its own ``on_save_checkpoint`` is trusted. Checkpoints hold what the metrics of torchmetrics
    have counted in an unfinished epoch, so one is named only if nothing resets it between epochs.

    A checkpoint keeps the names, and a run that continues repeats them before its first step.

    It must be the last callback, so that the others have changed what they change in a step.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        """What was found, such as ``Model.momentum``."""
        self._before: dict[str, Leaves] = {}
        self._unsaved_buffers: list[str] = []
        self._full_metrics: list[str] = []
        self._first_epoch = 0
        self._num_compared = 0

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
        self._first_epoch, self._num_compared = trainer.current_epoch, 0
        self._before = self._look(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        """Note the metrics that still count the first epoch when the second begins."""
        if trainer.current_epoch - self._first_epoch == self._num_compared == 1:
            self._full_metrics = [
                f"{class_of(pl_module).__name__}.{name}"
                for name, part in pl_module.named_modules()
                if isinstance(part, Metric) and part.update_called
            ]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        """Compare after the first batch of the first epoch, and of the second."""
        # In the second one, a loader has begun again, and the module may have told it the epoch.
        num_epochs = trainer.current_epoch - self._first_epoch
        if num_epochs == self._num_compared < 2 and trainer.is_global_zero:
            self._num_compared += 1
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
        changed = [
            name for name, leaves in now.items() if leaves and leaves != self._before.get(name)
        ]
        new = [name for name in changed + self._full_metrics if name not in self.names]
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
        # What a checkpoint holds: these objects, and the places of the weights in memory.
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        weights = [*pl_module.parameters(), *buffers.values()]
        parts: list[Any] = [*pl_module.modules(), *trainer.optimizers, *schedules, *weights]
        kept = {number for part in parts for number in (id(part), place_of(part))}
        kept -= {number for b in unsaved.values() for number in (id(b), place_of(b))} | {0}
        attributes = list(attributes_of_module(pl_module))
        for name, buffer in unsaved.items():
            attributes.append((f"{class_of(pl_module).__name__}.{name}", buffer, None))
        data = trainer.datamodule  # type: ignore[attr-defined]
        for owner in [*callbacks_of(trainer, L.Callback), data]:
            if owner is not None and not is_of_library(owner):
                attributes += attributes_of_owner(owner)
        for loader in find_loaders(trainer.train_dataloader):
            # A loader with a state of its own says what it needs.
            if not hasattr(loader, "load_state_dict"):
                attributes += attributes_of_loader(loader, data)

        found = {}
        for name, value, saved in attributes:
            leaves = read(value, kept)
            if not set(read(saved, kept)).issuperset(leaves):
                found[name] = leaves
        return found


def attributes_of_module(module: L.LightningModule) -> Iterator[Attribute]:
    """The attributes of a module and of all its parts that do not save themselves."""
    of_base = vars(L.LightningModule()).keys()
    hooks = ("on_save_checkpoint", "state_dict", "get_extra_state")
    for path, part in module.named_modules():
        name = ".".join(filter(None, [class_of(module).__name__, path]))
        if part is module or not (isinstance(part, (Sums, Metric)) or is_of_library(part)):
            base = L.LightningModule if part is module else nn.Module
            # Such a part says itself what a checkpoint holds of it.
            if any(getattr(type(part), h, None) is not getattr(base, h, None) for h in hooks):
                continue
            for attribute, value in vars(part).items():
                if attribute not in of_base:
                    yield f"{name}.{attribute}", value, None


def attributes_of_owner(owner: Any) -> Iterator[Attribute]:
    """The attributes of a callback or DataModule."""
    base: Any = L.Callback if isinstance(owner, L.Callback) else L.LightningDataModule
    hook = getattr(type(owner), "on_save_checkpoint", None)
    if hook is not getattr(base, "on_save_checkpoint", None):
        return
    has_library_parent = any(
        is_of_library(parent, itself=True) and not issubclass(base, parent)
        for parent in type(owner).__mro__[1:]
    )
    of_base, saved = vars(base()).keys(), owner.state_dict()
    for attribute, value in vars(owner).items():
        if attribute not in of_base and not (has_library_parent and attribute.startswith("_")):
            yield f"{type(owner).__name__}.{attribute}", value, saved


def attributes_of_loader(loader: Any, data: Any) -> Iterator[Attribute]:
    """The attributes of a loader and of what it reads, such as the passes that a data set counts.

    The DataModule may hold them in its ``state_dict``.
    """
    saved = data.state_dict() if data is not None else None
    parts, of_torch = [loader], set[str]()
    if isinstance(loader, DataLoader):
        batch_sampler = loader.batch_sampler
        while isinstance(batch_sampler, WrappedBatches):
            batch_sampler = batch_sampler.batches
        sampler = getattr(batch_sampler, "sampler", None)
        parts += [loader.dataset, loader.sampler, batch_sampler, sampler]
        of_torch = {name for name in vars(loader) if name.startswith("_")}
    for part in parts:
        # Lightning tells a sampler that has ``set_epoch`` the epoch, also after a restart.
        is_told = hasattr(part, "set_epoch") and part is not getattr(loader, "dataset", None)
        if part is not None and not is_of_library(part) and not is_told:
            for attribute, value in getattr(part, "__dict__", {}).items():
                if part is not loader or attribute not in of_torch:
                    yield f"{type(part).__name__}.{attribute}", value, saved


def read(value: Any, kept: set[int]) -> Leaves:
    """The numbers in a value; none for what is no state, such as text, or is in ``kept``."""
    return list(islice(leaves_of(value, kept), MAX_LEAVES))


def leaves_of(value: Any, kept: set[int], depth: int = 0) -> Iterator[object]:
    """Each number, array or generator in a value, as something that can be compared."""
    if depth > MAX_DEPTH or not kept.isdisjoint((id(value), place_of(value))):
        return
    for kind, leaf_of in LEAVES.items():
        if isinstance(value, kind):
            yield leaf_of(value)
            return
    children: list[Any] = []  # what a container holds, or an object that is not of a library
    if isinstance(value, dict):
        children = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        children = list(value)
    elif isinstance(value, (nn.Module, Optimizer, LRScheduler)):
        # A net in a list or a callback, an optimizer that Lightning does not know.
        children = [value.state_dict()]
    elif isinstance(value, (Namespace, SimpleNamespace)) or not is_of_library(value):
        children = [vars(value)] if hasattr(value, "__dict__") else []
    if len(children) > 2 * NUM_ENDS:
        children = [len(children), *children[:NUM_ENDS], *children[-NUM_ENDS:]]
    for child in children:
        yield from leaves_of(child, kept, depth + 1)


def bytes_of_tensor(tensor: Tensor) -> bytes:
    """Some values of a tensor, spread over all of it."""
    if tensor.is_meta:
        return b""
    part = tensor.detach().flatten()[:: max(1, tensor.numel() // MAX_VALUES)]
    return part.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def bytes_of_array(array: Any) -> bytes:
    """Some values of an array, spread over all of it."""
    if array.dtype == object:
        return b""
    part: bytes = array.ravel()[:: max(1, array.size // MAX_VALUES)].tobytes()
    return part


LEAVES: dict[Any, Callable[[Any], object]] = {
    (bool, int, float, complex, np.generic): repr,
    Tensor: bytes_of_tensor,
    np.ndarray: bytes_of_array,
    torch.Generator: lambda generator: generator.get_state().numpy().tobytes(),
    np.random.Generator: lambda generator: repr(generator.bit_generator.state),
    random.Random: lambda generator: generator.getstate(),
}


def is_of_library(value: Any, *, itself: bool = False) -> bool:
    """Whether the class of ``value``, or ``value`` itself, is of a library that we know."""
    kind = value if itself else class_of(value)
    return str(kind.__module__).partition(".")[0] in LIBRARIES


def place_of(tensor: Tensor) -> int:
    """Where a plain tensor lies in memory, which its views share; otherwise 0."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
        return 0
    return tensor.untyped_storage().data_ptr()


def find_own_state(module: nn.Module) -> list[str]:
    """The methods with which a model and its parts write state of their own into a checkpoint."""
    extra = {
        f"{class_of(part).__name__}.get_extra_state"
        for part in module.modules()
        # LightningModules and metrics have their own, which is not state of the training.
        if type(part).get_extra_state is not nn.Module.get_extra_state and not is_of_library(part)
    }
    if is_overridden("on_save_checkpoint", module):
        extra.add(f"{class_of(module).__name__}.on_save_checkpoint")
    return sorted(extra)


def briefly(names: list[str]) -> str:
    """The names in a sentence."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
