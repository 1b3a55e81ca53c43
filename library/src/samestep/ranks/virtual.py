"""Virtual ranks: a step is what V ranks would compute, on any number of processes up to V.

The batch of a step is cut into V slices. A process has some of them, and computes them one after
the other: each is a batch of its own, with random numbers of its own. What a rank keeps for itself
(buffers, what metrics and ``self.log`` have counted, numbers in attributes) each slice keeps. The
gradients are summed in one binary tree over the slices, within a process as far as a subtree lies
in it, and across the processes above that. So every step has the same bits on any number of them.

Without ``virtual_ranks`` each process has one slice, and DDP sums the gradients.

The idea: EasyScale (SC '23), https://doi.org/10.1145/3581784.3607054.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, TypeVar

import lightning as L
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import Metric, MetricCollection

from samestep.errors import ConfigError
from samestep.option_names import setting
from samestep.ranks import collectives, environment, process_group
from samestep.ranks.compat import of_kind
from samestep.ranks.epoch_sums import EpochSums, counts_of, has_counted

Result = TypeVar("Result")
Node = tuple[int, int]
"""A subtree: its first slice, and the one after its last."""
Gradients = list[Tensor | None]
"""One for each parameter; None if no slice has used it."""
Place = tuple[dict[str, Any], str]
"""An entry of a dictionary, such as a buffer of a module."""

GATHER_BELOW = 2**18  # bytes of a gradient: all_gather takes one round trip, and shards take two
LIBRARIES = "torch", "torchmetrics", "lightning", "samestep"
"""Their modules keep no numbers that training depends on in attributes."""


# -- Who has which slices --------------------------------------------------------------------------


class Layout(NamedTuple):
    """Which process has which slices of a batch."""

    bounds: tuple[int, ...]
    """Where the slices of each process begin, and the number of all."""
    rank: int
    is_virtual: bool

    @property
    def total(self) -> int:
        """The number of slices."""
        return self.bounds[-1]

    @property
    def own(self) -> range:
        """The slices of this process."""
        return range(self.bounds[self.rank], self.bounds[self.rank + 1])

    @property
    def has_several(self) -> bool:
        """Whether some process has several slices."""
        return self.total >= len(self.bounds)


_layout: Layout | None = None  # of the run of this process; None outside of one
_current: int | None = None
_worlds: "Worlds | None" = None
_alone: list[Metric] = []  # those that have kept the value of a slice


def use(number: int | None, shares: Sequence[float] = ()) -> None:
    """Let each batch have so many slices from now on; None: one for each process.

    Args:
        number: of slices.
        shares: how many of them each process gets, in any unit; empty: all the same.
    """
    global _layout, _worlds
    ranks, _worlds = environment.world_size(), None
    if number is None:
        _layout = one_for_each(ranks, environment.rank())
        return
    shares = shares or [1.0] * ranks
    bounds = [0]
    for place, part in enumerate(accumulate(shares), start=1):
        end = round(number * part / sum(shares))
        # Each process has a slice, and leaves one for each that follows.
        bounds.append(min(max(end, bounds[-1] + 1), number - ranks + place))
    _layout = Layout(tuple(bounds), environment.rank(), is_virtual=True)


def check(number: int | None) -> None:
    """Raise a ConfigError if a process would have no slice."""
    ranks = environment.world_size()
    if number is not None and number < ranks:
        raise ConfigError(
            f"{setting('virtual_ranks', number)}: there are {ranks} ranks, and each computes at "
            f"least one slice of a batch; use {ranks} or more, or fewer ranks"
        )


def leave() -> None:
    """Keep what the first slice has: the run is over."""
    global _layout, _worlds
    _layout = _worlds = None


def layout() -> Layout:
    """Which process has which slices."""
    return _layout or one_for_each(environment.world_size(), environment.rank())


@cache
def one_for_each(ranks: int, rank: int) -> Layout:
    """The layout without virtual ranks."""
    return Layout(tuple(range(ranks + 1)), rank, is_virtual=False)


def is_shared() -> bool:
    """Whether a batch has other slices too, in this process or in others."""
    return _worlds is not None or collectives.num_ranks() > 1


def current() -> int:
    """The slice that is computed now; between two steps the first one of this process."""
    return layout().own[0] if _current is None else _current


def leave_alone(metric: Metric) -> bool:
    """Whether a metric is computed within a step, where it is that of the current slice.

    The other slices may not be computed yet. Between two steps it is that of all.
    """
    if _current is not None:
        _alone.append(metric)
    return _current is not None


@contextmanager
def slice_of_step(number: int) -> Iterator[None]:
    """Compute a slice of this process within this block."""
    global _current
    before, _current = _current, number
    if _worlds is not None:
        _worlds.enter(number)
    try:
        yield
    finally:
        _current = before
        if _worlds is not None:
            _worlds.enter(current())


def each(function: Callable[[], Result]) -> list[Result]:
    """What a function gives for each slice of this process; it may change what a slice keeps."""
    found = []
    begin_step()
    for number in layout().own:
        with slice_of_step(number):
            found.append(function())
    end_step()
    return found


def gather(function: Callable[[], Result]) -> list[Result]:
    """What a function gives for each slice of a batch; every rank must call this."""
    return [*chain.from_iterable(process_group.gather(each(function)))]


def begin_step() -> None:
    """What was changed since the last step was changed for all slices."""
    if _worlds is not None:
        _worlds.spread()


def end_step() -> None:
    """From here on hooks change what all slices keep."""
    while _alone:
        _alone.pop()._computed = None
    if _worlds is not None:
        _worlds.mark()


def begin_stage(module: nn.Module, loop: Any) -> None:
    """Let each slice count for itself; ``loop`` has the results of ``self.log`` in ``_results``."""
    global _worlds
    own = layout().own
    if len(own) == 1:
        return
    if _worlds is None or _worlds.module is not module or _worlds.own != own:
        _worlds = Worlds(module, own)
    _worlds.begin_stage(loop)


def needs_all_slices(what: str) -> ConfigError:
    """The error for an operation of all slices, of which a rank has one after the other."""
    number = layout().total
    return ConfigError(
        f"{setting('virtual_ranks', number)}: {what} needs all slices of a batch at once, and a "
        f"rank computes one after the other; use {number} ranks, or the loss of a slice, which is "
        "the same on any number of ranks"
    )


def reject_within_slices(strategy: Any) -> None:
    """Let ``self.all_gather`` of a module raise a ConfigError within a slice, on one rank too."""
    gather_all = strategy.all_gather

    def all_gather(*arguments: Any, **options: Any) -> Any:
        if _current is not None:
            raise needs_all_slices("self.all_gather")
        return gather_all(*arguments, **options)

    strategy.all_gather = all_gather


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this block operations of ``torch.distributed`` raise a ConfigError."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation that is not one of all ranks."""
        if func.namespace in ("c10d", "_c10d_functional"):
            raise needs_all_slices(f"torch.distributed ({func.__name__})")
        return func(*args, **(kwargs or {}))


# -- What each slice keeps -------------------------------------------------------------------------


class Worlds:
    """What a rank keeps for itself, once for each slice of this process.

    That of a slice is in its place in the model while the slice is computed. Between two steps that
    of the first one is.

    Args:
        module: the model.
        own: the slices of this process.
    """

    def __init__(self, module: nn.Module, own: range) -> None:
        self.module = module
        self.own = own
        self._loops: list[Any] = []
        self._active = own[0]
        self._places: list[Place] = []
        self._num_shared = 0  # of these, those that hooks between two steps change for all slices
        self._values: dict[int, list[Any]] = {number: [] for number in own[1:]}
        self._marks: list[Any] = []
        self._collections: list[MetricCollection] = []

    def begin_stage(self, loop: Any) -> None:
        """Look for what the model has now. What is new, or was reset, is so for all slices."""
        if loop not in self._loops:
            self._loops.append(loop)
        known = {(id(holder), name): i for i, (holder, name) in enumerate(self._places)}
        self._collections = of_kind(self.module.modules(), MetricCollection)
        self.spread()
        shared = [*find_buffers(self.module)]
        shared += [place for _, place in find_numbers(self.module)]
        counts = [*find_counts(self.module)]
        self._num_shared = len(shared)
        results = [(vars(each), "_results") for each in self._loops]
        self._places = [*shared, *(place for place, _ in counts), *results]
        is_new = [False] * len(shared)
        is_new += [was_reset for _, was_reset in counts]
        is_new += [each is loop for each in self._loops]
        for other, before in self._values.items():
            copies: dict[int, Any] = {}  # two names of one tensor stay so
            values = []
            for (holder, name), starts in zip(self._places, is_new, strict=True):
                number = known.get((id(holder), name))
                if starts or number is None:
                    value = holder[name]
                    values.append(copies.setdefault(id(value), copy_of(value)))
                else:
                    values.append(before[number])
            self._values[other] = values
        self.mark()

    def enter(self, number: int) -> None:
        """Put what a slice keeps in its place."""
        if number == self._active:
            return
        for collection in self._collections:
            # Members with equal states update one of them only; reading them updates all.
            list(collection.items(keep_base=True, copy_state=False))
        self._values[self._active] = [holder.get(name) for holder, name in self._places]
        for (holder, name), value in zip(self._places, self._values.pop(number), strict=True):
            holder[name] = value
        self._active = number

    def mark(self) -> None:
        """Note what the first slice keeps."""
        shared = self._places[: self._num_shared]
        self._marks = [mark_of(holder.get(name)) for holder, name in shared]

    def spread(self) -> None:
        """Change for all slices what was changed since."""
        for place, (holder, name) in enumerate(self._places[: self._num_shared]):
            if name in holder and mark_of(holder[name]) != self._marks[place]:
                for values in self._values.values():
                    values[place] = copy_of(holder[name])


def find_buffers(module: nn.Module) -> Iterator[Place]:
    """Where the buffers of a module are, but for those of metrics."""
    for part in module.modules():
        if isinstance(part, Metric):
            continue
        for name, buffer in part._buffers.items():
            if buffer is not None and not is_lazy(buffer) and buffer.numel():
                yield part._buffers, name


def find_numbers(module: nn.Module) -> Iterator[tuple[str, Place]]:
    """Numbers and tensors in attributes of parts that no library has written, by their names."""
    of_lightning = vars(L.LightningModule()).keys()
    for path, part in module.named_modules():
        if type(part).__module__.partition(".")[0] in LIBRARIES:
            continue
        for name, value in vars(part).items():
            # By its type: an object may raise when it is asked for its class.
            is_number = issubclass(type(value), int | float | complex | Tensor)
            if is_number and name not in of_lightning:
                yield f"{path}.{name}".lstrip("."), (vars(part), name)


def numbers_of(module: nn.Module) -> dict[str, Any]:
    """The numbers in attributes that the current slice has."""
    found = {}
    for full_name, (holder, name) in find_numbers(module):
        value = holder[name]
        found[full_name] = copy_of(value).cpu() if isinstance(value, Tensor) else value
    return found


def set_numbers(module: nn.Module, values: dict[str, Any]) -> None:
    """Give the current slice the numbers that one had before."""
    for full_name, (holder, name) in find_numbers(module):
        value, old = values.get(full_name, holder[name]), holder[name]
        holder[name] = value.to(old.device) if isinstance(value, Tensor) else value


def find_counts(module: nn.Module) -> Iterator[tuple[Place, bool]]:
    """Where metrics count, and whether they have counted nothing."""
    for part in module.modules():
        if isinstance(part, Metric):
            part.distributed_available_fn = is_shared
            was_reset = not has_counted(part)
            for name in sorted(counts_of(part)):
                yield (vars(part), name), was_reset
        elif isinstance(part, EpochSums):
            for name in sorted(vars(part).keys() - vars(nn.Module()).keys()):
                yield (vars(part), name), False


def copy_of(value: Any) -> Any:
    """The same numbers in other memory. Other objects stay the same one."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list):
        return [copy_of(each) for each in value]
    if isinstance(value, _ResultCollection):
        empty: Any = _ResultCollection(value.training)
        # Those of ``plugins.epoch_means``.
        empty.calls = {} if hasattr(value, "calls") else None
        return empty
    return value


def mark_of(value: Any) -> Any:
    """What differs when a value was changed, or exchanged."""
    if not isinstance(value, Tensor):
        return value
    return id(value), None if value.is_inference() else value._version


# -- The sum of the gradients ----------------------------------------------------------------------


def middle(node: Node) -> int:
    """Where a subtree is cut: after the largest power of two below its size."""
    start, end = node
    return start + (1 << ((end - start - 1).bit_length() - 1))


def find_nodes(own: range, node: Node) -> list[Node]:
    """The largest subtrees of a subtree that lie in a process."""
    start, end = node
    if own.stop <= start or end <= own.start:
        return []
    if own.start <= start and end <= own.stop:
        return [node]
    cut = middle(node)
    return [*find_nodes(own, (start, cut)), *find_nodes(own, (cut, end))]


def pairs_of(node: Node) -> Iterator[tuple[Node, Node]]:
    """The two halves of each subtree."""
    start, end = node
    if end - start > 1:
        cut = middle(node)
        yield (start, cut), (cut, end)
        yield from pairs_of((start, cut))
        yield from pairs_of((cut, end))


def combine(parts: dict[Node, Tensor], node: Node) -> Tensor:
    """The sum of a subtree, from those of the subtrees that are known; changes them."""
    if node in parts:
        return parts[node]
    start, end = node
    cut = middle(node)
    return combine(parts, (start, cut)).add_(combine(parts, (cut, end)))


class GradientTree:
    """Sums the gradients of the slices of a step in the order of the tree.

    At most log2 of the slices of a process, and one more, are in memory.

    Args:
        layout: of the slices.
    """

    def __init__(self, layout: Layout) -> None:
        whole = 0, layout.total
        self._whole = whole
        self._nodes = [find_nodes(range(*pair), whole) for pair in pairwise(layout.bounds)]
        self._pairs = {*pairs_of(whole)}
        self._stack: list[tuple[Node, Gradients]] = []
        self._kept: dict[Any, Tensor] = {}

    def add(self, number: int, gradients: Gradients) -> None:
        """Add those of a slice of this process; the slices come in their order."""
        node = number, number + 1
        while self._stack and (self._stack[-1][0], node) in self._pairs:
            (start, _), left = self._stack.pop()
            gradients = add(left, gradients)
            node = start, node[1]
        self._stack.append((node, gradients))

    def total(self, parameters: Sequence[Tensor]) -> Gradients:
        """The sums over all slices, on every rank; None for what none of them has used."""
        own, self._stack = [gradients for _, gradients in self._stack], []
        if len(self._nodes) == 1:
            return own[0]
        sums: Gradients = [None] * len(parameters)
        kinds: dict[Any, list[int]] = {}
        for place, parameter in enumerate(parameters):
            if parameter.requires_grad:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(place)
        for kind, places in kinds.items():
            of_kind = [parameters[place] for place in places]
            rows = [[gradients[place] for place in places] for gradients in own]
            for place, total in zip(places, self._over_ranks(kind, of_kind, rows), strict=True):
                sums[place] = total
        return sums

    def _over_ranks(self, kind: Any, parameters: list[Tensor], own: list[Gradients]) -> Gradients:
        """The sums of the parameters of one kind."""
        size = sum(parameter.numel() for parameter in parameters)
        # The last entries tell who uses what, without another round trip.
        width = size + len(parameters)
        ranks = len(self._nodes)
        is_small = width * parameters[0].element_size() < GATHER_BELOW
        shard = width if is_small else -(-width // ranks)
        rows = max(map(len, self._nodes)) if is_small else len(own)
        # Kept for the next step: new memory of this size costs as much time as the sum.
        flat = self._memory(kind, "own", (rows, width if is_small else shard * ranks), parameters)
        for row, gradients in zip(flat, own, strict=False):
            views = split_like(row[:size], parameters)
            row[size:width] = 1
            present = []
            for place, (view, gradient) in enumerate(zip(views, gradients, strict=True)):
                if gradient is None:
                    # Not 0: with it, a sum of -0 would have another sign than without.
                    view.fill_(-0.0)
                    row[size + place] = 0
                else:
                    present.append((view, gradient))
            if present:
                torch._foreach_copy_(*unzip(present))
        if is_small:
            gathered = self._memory(kind, "all", (ranks, *flat.shape), parameters)
            exchange(dist.all_gather_into_tensor, gathered, flat)
            parts: dict[Node, Tensor] = {}
            for nodes, of_rank in zip(self._nodes, gathered, strict=True):
                parts |= dict(zip(nodes, of_rank, strict=False))
            total = combine(parts, self._whole)
        else:
            total = self._by_shards(kind, flat, shard, parameters)
        gradients = [*split_like(total[:size], parameters)]
        # Only what none of our own slices has used can be what nobody has.
        for place in range(len(parameters)):
            if all(of_node[place] is None for of_node in own) and not total[size + place]:
                gradients[place] = None
        return gradients

    def _by_shards(self, kind: Any, flat: Tensor, shard: int, like: list[Tensor]) -> Tensor:
        """Each rank sums a part, and sends it to all: what a ring's all-reduce costs."""
        ranks = len(self._nodes)
        rows = len(flat)
        send = self._memory(kind, "send", (ranks, rows, shard), like)
        send.copy_(flat.view(rows, ranks, shard).transpose(0, 1))
        counts = [len(nodes) * shard for nodes in self._nodes]
        received = self._memory(kind, "received", (sum(counts),), like)
        size = received.element_size()
        exchange(
            dist.all_to_all_single, received, send,
            [count * size for count in counts], [rows * shard * size] * ranks,
        )  # fmt: skip
        nodes = [*chain.from_iterable(self._nodes)]
        own = combine(dict(zip(nodes, torch.split(received, shard), strict=True)), self._whole)
        total = self._memory(kind, "total", (ranks * shard,), like)
        exchange(dist.all_gather_into_tensor, total, own)
        return total

    def _memory(
        self, kind: Any, name: str, shape: tuple[int, ...], like: Sequence[Tensor]
    ) -> Tensor:
        """A tensor that is used again in each step."""
        kept = self._kept.get((kind, name))
        if kept is None or kept.shape != shape:
            kept = self._kept[kind, name] = torch.zeros(
                shape, dtype=like[0].dtype, device=like[0].device
            )
        return kept


def exchange(operation: Callable[..., Any], output: Tensor, given: Tensor, *counts: Any) -> None:
    """Exchange tensors as bytes, which every backend has: nothing is added up there."""
    as_bytes = [each.view(-1).view(torch.uint8) for each in (output, given)]
    operation(*as_bytes, *counts, group=collectives.group_of(given))


def add(left: Gradients, right: Gradients) -> Gradients:
    """The sum of two gradients, in the memory of the first."""
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if pairs:
        torch._foreach_add_(*unzip(pairs))
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def unzip(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """The first ones, and the second ones."""
    return [left for left, _ in pairs], [right for _, right in pairs]


def split_like(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat tensor in the shapes of the parameters, and in their order in memory."""
    # A norm adds up what lies side by side: a gradient must lie as it does on a rank alone.
    parts = torch.split(flat, [parameter.numel() for parameter in parameters])
    return [view_like(part, p) for part, p in zip(parts, parameters, strict=True)]


def view_like(flat: Tensor, parameter: Tensor) -> Tensor:
    """A view of a flat tensor that lies in memory as the gradient of a parameter does."""
    if parameter.is_contiguous():
        return flat.view(parameter.shape)
    strides = torch.empty_like(parameter, device="meta").stride()
    return flat.as_strided(parameter.shape, strides)
