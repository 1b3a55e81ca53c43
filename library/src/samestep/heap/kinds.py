"""What an object holds, by its class, and how it is given back.

A ``Kind`` reads an object as plain values and other objects, and changes an object in place so that
it holds them again. ``register`` adds one; without one, an object of Python code is its attributes.
"""

import random
import sys
from abc import ABC
from argparse import Namespace
from array import array
from collections import ChainMap, UserDict, UserList, UserString, deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cache, partial
from multiprocessing.sharedctypes import SynchronizedBase
from queue import Queue
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any, Generic, NamedTuple, Protocol

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torchmetrics import Metric, MetricCollection

from samestep.data.sampler import ExactLoader, WrappedBatches
from samestep.ranks import epoch_sums
from samestep.ranks.epoch_sums import EpochSums

FRAMEWORKS = {"torch", "lightning", "samestep", "torchmetrics"}
LIBRARIES = FRAMEWORKS | {"omegaconf"} | sys.stdlib_module_names
ATOMS = {type(None), bool, int, float, complex, str, bytes}
PLAIN_PARENTS = {*Namespace.__mro__, ABC, Generic, Protocol, tuple}
"""Parents that add no state of their own to the attributes of an object."""
LAYER_SETTINGS = {*ATOMS, FunctionType, BuiltinFunctionType}
"""What a program may change in a layer of torch, beside its weights."""
GROUPS = "_modules", "_parameters", "_buffers"
"""Where a module has what is registered; the names of such fields have these in front."""
OF_LOADER = "dataset", "sampler", "batch_sampler", "collate_fn", "generator"


class Kind(NamedTuple):
    """How objects of a class are read, and changed in place."""

    read: Callable[[Any], Any]
    """Plain values, or a new container of other objects; never the object itself."""
    write: Callable[[Any, Any], None]
    has_fields: bool = False
    """Whether ``read`` gives a dictionary, of which ``write`` takes any part."""
    make: Callable[[Any], Any] = object.__new__
    """An object of the class that holds nothing yet; no code of the user is called."""


def kind_of(value: Any) -> Kind | None:
    """How an object is read; None if nothing of it can be read."""
    return kind_of_class(type(value))


def kind_of_class(kind: type) -> Kind | None:
    """The kind of the nearest parent that has one; attributes, if Python code made the class."""
    for parent in kind.__mro__:
        found = KINDS.get(parent) or KINDS.get(f"{package_of(parent)}:{parent.__qualname__}")
        if found is not None:
            return found
    return ATTRIBUTES if is_plain_class(kind) else None


def register(
    kind: type | str, read: Callable[[Any], Any], write: Callable[[Any, Any], None]
) -> None:
    """Let checkpoints keep the objects of a class.

    Without it an object is its attributes, if Python code made its class; what a library holds in
    memory of its own is lost. ::

        samestep.register(Tree, Tree.to_bytes, Tree.assign_bytes)

    Args:
        kind: the class, also of all that inherit from it; or the name of one that need not be
            imported, ``package:Class``.
        read: gets an object; returns what it holds: numbers, texts, tensors, arrays, containers or
            objects that can be kept themselves. It changes nothing.
        write: gets an object of this class and what ``read`` returned, in the process that
            continues. It changes the object in place, which may be one without any attributes:
            of an object that training made, ``__init__`` is not called.
    """
    KINDS[kind] = Kind(read, write)


# -- Containers, tensors and arrays ----------------------------------------------------------------


def read_items(container: Any) -> tuple[Any, Any]:
    """The items of a list, set or dictionary, and the attributes of a class that inherits."""
    items = dict(container) if isinstance(container, dict) else list(container)
    return items, getattr(container, "__dict__", None)


def write_items(container: Any, new: tuple[Any, Any]) -> None:
    """Replace the items, and set the attributes."""
    items, attributes = new
    # Not the methods of a class that inherits, which may do anything.
    base = base_of_items(type(container))
    base.clear(container)
    add: Any = base.update if base in (dict, set) else base.extend
    add(container, items)
    write_attributes(container, attributes or {})


def base_of_items(kind: type) -> Any:
    """The container of Python that a class is."""
    return next(base for base in (dict, list, deque, set) if issubclass(kind, base))


def make_queue(kind: type) -> "Queue[Any]":
    """An empty queue, whatever arguments its class takes."""
    queue: Queue[Any] = object.__new__(kind)
    Queue.__init__(queue)
    return queue


def write_tensor(tensor: Tensor, new: Tensor) -> None:
    """Copy, so that views see it; a tensor that has got another size in place gets it again."""
    with torch.no_grad():
        if tensor.shape == new.shape:
            tensor.copy_(new)
        else:
            tensor.data = new.to(tensor.device, tensor.dtype)


def read_array(values: Any) -> Any:
    """A view; objects as a list, because their bytes are addresses."""
    return values.ravel().tolist() if values.dtype.hasobject else values.view(np.ndarray)


def write_array(values: Any, new: Any) -> None:
    """Copy the values; an array that has got another size in place gets it again."""
    if not values.dtype.hasobject and values.shape != new.shape:
        values.resize(new.shape, refcheck=False)
    values.flat[:] = new if values.dtype.hasobject else new.ravel()


def read_numbers(numbers: "array[Any]") -> tuple[str, bytes]:
    """The type of the numbers in Python's own array, and their bytes."""
    return numbers.typecode, numbers.tobytes()


def write_numbers(numbers: "array[Any]", new: tuple[str, bytes]) -> None:
    """Replace the numbers."""
    numbers[:] = array(*new)


def read_frame(frame: Any) -> tuple[Any, Any, Any]:
    """Index, names and columns of a table of pandas."""
    columns = [frame.iloc[:, number].to_numpy() for number in range(frame.shape[1])]
    return frame.index.to_numpy(), list(frame.columns), columns


def write_frame(frame: Any, new: tuple[Any, Any, Any]) -> None:
    """Make the table anew, in place."""
    index, names, columns = new
    frame.__init__(dict(enumerate(columns)), index=index, copy=True)
    frame.columns = names


# -- Attributes ------------------------------------------------------------------------------------


def read_attributes(value: object) -> dict[str, Any]:
    """The attributes of an object, those in ``__slots__`` first."""
    found = {}
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        # One slot may be written as a text.
        for name in [slots] if isinstance(slots, str) else slots:
            # A slot may be empty.
            with suppress(AttributeError):
                found[name] = object.__getattribute__(value, name)
    return found | getattr(value, "__dict__", {})


def write_attributes(value: object, new: Mapping[str, Any]) -> None:
    """Set attributes, also those of a frozen dataclass."""
    for name, item in new.items():
        object.__setattr__(value, name, item)


def read_module(module: nn.Module) -> dict[str, Any]:
    """The parts, parameters, buffers and attributes of one part of a module."""
    if isinstance(module, MetricCollection):
        # Members with equal states update one of them only; reading them updates the others.
        list(module.items(keep_base=True, copy_state=False))
    if isinstance(module, EpochSums):
        return {}
    found: dict[str, Any] = {}
    for group in GROUPS:
        found |= {f"{group}.{name}": part for name, part in vars(module)[group].items()}
    return found | attributes_of_module(module)


def attributes_of_module(module: nn.Module) -> dict[str, Any]:
    """What a part of a module has beside what is registered, and what every part has."""
    base = next(kind for kind in (L.LightningModule, Metric, nn.Module) if isinstance(module, kind))
    counts = epoch_sums.counts_of(module) if isinstance(module, Metric) else set()
    names = vars(module).keys() - base_attributes(base) | counts
    found = {name: vars(module)[name] for name in sorted(names)}
    if base is nn.Module and package_of(type(module)) in FRAMEWORKS:
        return {name: each for name, each in found.items() if type(each) in LAYER_SETTINGS}
    # Under DDP Lightning leaves the module's own ``forward`` behind as an attribute.
    own = found.get("forward")
    if type(own) is MethodType and own.__self__ is module:
        del found["forward"]
    return found


def write_module(module: nn.Module, new: Mapping[str, Any]) -> None:
    """Give a part of a module what it had."""
    for name, value in new.items():
        group, _, key = name.rpartition(".")
        # A module would register a net that was hidden from it, and a metric rejects names.
        (vars(module)[group] if group else vars(module))[key] = value


def read_callback(callback: L.Callback) -> dict[str, Any]:
    """The attributes of a callback, but for what it saves itself, or a library has made."""
    if type(callback).on_save_checkpoint is not L.Callback.on_save_checkpoint:
        return {}
    parents = type(callback).__mro__
    if not any(is_of_library(each) and each not in L.Callback.__mro__ for each in parents):
        return read_attributes(callback)
    saved = callback.state_dict().keys()
    attributes = read_attributes(callback).items()
    return {k: v for k, v in attributes if not k.startswith("_") and k not in saved}


def read_datamodule(data: L.LightningDataModule) -> dict[str, Any]:
    """The attributes of a DataModule; one with a state of its own says what it needs."""
    if type(data).state_dict is not L.LightningDataModule.state_dict:
        return {}
    return {k: v for k, v in vars(data).items() if k not in base_attributes(L.LightningDataModule)}


def read_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer holds, and its class adds."""
    return {k: v for k, v in vars(optimizer).items() if k not in base_attributes(Optimizer)}


def read_loader(loader: Any) -> dict[str, Any]:
    """From where a loader gets its samples."""
    return {name: vars(loader)[name] for name in OF_LOADER if name in vars(loader)}


def read_function(function: Any) -> dict[str, Any]:
    """The variables that a function of the user shares with others."""
    if is_installed(function):
        return {}
    names = function.__code__.co_freevars
    cells = dict(zip(names, function.__closure__ or (), strict=True))
    found = {name: cell.cell_contents for name, cell in cells.items() if cell != CellType()}
    return found | {"__defaults__": function.__defaults__}


def write_function(function: Any, new: Mapping[str, Any]) -> None:
    """Set its variables."""
    names = function.__code__.co_freevars
    for name, value in new.items():
        function.__closure__[names.index(name)].cell_contents = value


def read_class(kind: type) -> dict[str, Any]:
    """The values that all objects of a class of the user share."""
    shared = {name: value for name, value in vars(kind).items() if not name.startswith("__")}
    return {name: value for name, value in shared.items() if not hasattr(value, "__get__")}


def write_class(kind: type, new: Mapping[str, Any]) -> None:
    """Set them."""
    for name, value in new.items():
        setattr(kind, name, value)


def classes_of(value: Any) -> list[type]:
    """The classes of an object that the user has written."""
    return [kind for kind in type(value).__mro__ if not is_installed(kind)]


def read_partial(function: Any) -> dict[str, Any]:
    """What a function is called with."""
    return {"func": function.func, "args": function.args, "keywords": function.keywords}


def write_nothing(value: Any, new: Any) -> None:
    """Leave what never changes."""


class PlainMetric(Metric):
    """Has the attributes of every metric."""

    def update(self) -> None:
        """Count nothing."""

    def compute(self) -> None:
        """Compute nothing."""


@cache
def base_attributes(kind: type) -> frozenset[str]:
    """The attributes that the framework gives to every object of this kind."""
    if kind is Optimizer:
        plain = torch.optim.SGD([torch.zeros(1)])
        return frozenset(vars(plain).keys() - {"state", "param_groups"})
    return frozenset(vars(PlainMetric() if kind is Metric else kind()))


# -- The table -------------------------------------------------------------------------------------

ATTRIBUTES = Kind(read_attributes, write_attributes, has_fields=True)
"""Of a class that nobody has registered."""
FIELDS = Kind(read_attributes, write_attributes, has_fields=True)
ITEMS = Kind(read_items, write_items, make=lambda kind: base_of_items(kind).__new__(kind))
KINDS: dict[type | str, Kind] = {
    **dict.fromkeys((list, deque, set, dict), ITEMS),
    **dict.fromkeys((UserList, UserDict, UserString, ChainMap), FIELDS),
    **dict.fromkeys((Dataset, IterableDataset, Sampler, LRScheduler), FIELDS),
    SimpleNamespace: FIELDS._replace(make=SimpleNamespace.__new__),
    Tensor: Kind(lambda tensor: tensor.detach(), write_tensor),
    np.ndarray: Kind(read_array, write_array),
    array: Kind(read_numbers, write_numbers),
    bytearray: Kind(bytes, lambda values, new: values.__setitem__(slice(None), new)),
    memoryview: Kind(bytes, lambda values, new: values.cast("B").__setitem__(slice(None), new)),
    Queue: Kind(
        lambda queue: queue.queue, lambda queue, new: setattr(queue, "queue", new), make=make_queue
    ),
    SynchronizedBase: Kind(
        lambda shared: bytes(shared.get_obj()),
        lambda shared, new: memoryview(shared.get_obj()).cast("B").__setitem__(slice(None), new),
    ),
    torch.Generator: Kind(
        torch.Generator.get_state,
        lambda generator, state: generator.set_state(state),
        make=torch.Generator.__new__,
    ),
    random.Random: Kind(random.Random.getstate, random.Random.setstate, make=random.Random.__new__),
    np.random.RandomState: Kind(
        np.random.RandomState.get_state, np.random.RandomState.set_state, make=lambda kind: kind()
    ),
    np.random.Generator: Kind(
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
        make=lambda kind: np.random.default_rng(),
    ),
    nn.Module: Kind(read_module, write_module, has_fields=True),
    Optimizer: Kind(read_optimizer, write_attributes, has_fields=True),
    L.Callback: Kind(read_callback, write_attributes, has_fields=True),
    L.LightningDataModule: Kind(read_datamodule, write_attributes, has_fields=True),
    DataLoader: Kind(read_loader, write_attributes, has_fields=True),
    ExactLoader: Kind(
        lambda loader: {"dataset": loader.dataset, "slices": vars(loader.slices)},
        write_nothing,
        has_fields=True,
    ),
    WrappedBatches: Kind(lambda batches: {"batches": batches.batches}, write_nothing, True),
    type: Kind(read_class, write_class, has_fields=True),
    FunctionType: Kind(read_function, write_function, has_fields=True),
    MethodType: Kind(lambda method: {"__self__": method.__self__}, write_nothing, True),
    partial: Kind(read_partial, write_nothing, has_fields=True),
    "sqlite3:Connection": Kind(
        lambda connection: connection.serialize(),
        lambda connection, new: connection.deserialize(new),
    ),
    "pandas:DataFrame": Kind(read_frame, write_frame),
    "pandas:Series": Kind(
        lambda series: (series.to_numpy(), series.index.to_numpy(), series.name),
        lambda series, new: series.__init__(*new[:2], name=new[2], copy=True),
    ),
}
"""How each class is read; classes that need not be imported by ``package:Class``."""


def fields_elsewhere(value: Any) -> Collection[str]:
    """The fields that Lightning's checkpoint or another callback holds, of a part of the run."""
    if isinstance(value, Optimizer):
        return "state", "param_groups"
    if isinstance(value, Metric):
        return epoch_sums.counts_of(value)
    if isinstance(value, LRScheduler):
        # Of functions of the user it saves nothing.
        return value.state_dict().keys() - {"lr_lambdas"}
    return ()


# -- Classes ---------------------------------------------------------------------------------------


def package_of(kind: type) -> str:
    """The package of a class."""
    return str(kind.__module__).partition(".")[0]


def is_of_library(kind: type) -> bool:
    """Whether a class is of a library whose memory we know nothing of."""
    return package_of(kind) in LIBRARIES


def is_plain_class(kind: type) -> bool:
    """Whether an object of this class is nothing but its attributes, as far as we can know."""
    for parent in kind.__mro__:
        if is_of_library(parent) and parent not in PLAIN_PARENTS:
            return False
    return kind not in (object, tuple)


def is_installed(kind: Any) -> bool:
    """Whether a class or function was installed, rather than written by the user."""
    module: Any = sys.modules.get(package_of(kind))
    file = getattr(module, "__file__", None) or ""
    return is_of_library(kind) or "-packages" in file
