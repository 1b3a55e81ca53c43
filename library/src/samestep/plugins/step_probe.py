"""Computes the losses of a training step, again and again, without a trace in the run.

All of it happens in a fork of this process; ``loss_check`` compares the losses.
"""

import dataclasses
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import Metric

from samestep import losses
from samestep.plugins.forked import call_in_fork
from samestep.ranks.strategies import is_sharded
from samestep.tracker import NullLogger

BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
MAX_GATHERED = 2**28  # weights of a sharded model
TIMEOUT_S = 30.0  # seconds


class Answer(NamedTuple):
    """The losses of some samples, and what was shared to compute them."""

    losses: list[float]
    """One for each loss that the step would minimize: several with manual optimization."""
    shared: list[Tensor]
    """What the samples gave to ``mean`` and ``gather_batch``, in the order of the calls."""
    is_random: bool
    """Whether random numbers were drawn."""
    is_one_mean: bool
    """Whether the loss is one ``samestep.mean``, which covers all batches of a step."""
    state: dict[str, Tensor]
    """Buffers and attributes of the module that the step has changed, by name."""


@dataclasses.dataclass
class OtherParts:
    """The other parts of a slice, in the place of the ranks: what they gave in the pass before.

    Args:
        index: of our part.
        given: what each part gave, in the order of the calls; empty in the first pass.
    """

    index: int
    given: Sequence[Sequence[Tensor]]
    own: list[Tensor] = dataclasses.field(default_factory=list)

    def total(self, own: Tensor) -> Tensor:
        """The sum over all parts."""
        return torch.stack(self._exchange(own)).sum(0)

    def slices(self, own: Tensor) -> list[Tensor]:
        """The slices of all parts."""
        return self._exchange(own)

    def _exchange(self, own: Tensor) -> list[Tensor]:
        number = len(self.own)
        self.own.append(own.detach())
        found = [own] if not self.given else []
        for index, given in enumerate(self.given):
            # Ours is new, because it may depend on what the others have given.
            found.append(own if index == self.index else given[number])
        return found


@dataclasses.dataclass
class Step:
    """Computes the losses of a training step, each time from the same state."""

    trainer: Any
    module: Any
    batch_idx: int
    weights: dict[str, Tensor]
    """All tensors of the module on the CPU, by name, if some are on another device."""
    is_double: bool = True
    """In 64 bits a difference is no rounding."""
    is_repeatable: bool = True
    """Whether a step leaves nothing behind that the loss of the next one depends on."""

    @property
    def tolerance(self) -> float:
        """Relative difference of numbers that are equal but for the order of their sums."""
        return 1e-9 if self.is_double else 1e-4

    @property
    def is_on_ranks(self) -> bool:
        """Whether there are several ranks."""
        return bool(self.trainer.world_size > 1)

    def prepare(self) -> None:
        """Let a step log nothing, write nothing and need no GPU, from now on in this process."""
        module = self.module
        if is_sharded(self.trainer.strategy):
            self.trainer.strategy.forget_sharding()
        for name, value in self.weights.items():
            path, _, last = name.rpartition(".")
            owner = module.get_submodule(path)
            old = getattr(owner, last)
            is_parameter = isinstance(old, nn.Parameter)
            setattr(owner, last, nn.Parameter(value, old.requires_grad) if is_parameter else value)
        if self.weights:
            # The states of metrics are on the device still, and no loss needs them.
            for part in module.modules():
                if isinstance(part, Metric):
                    leave_out(part)
            # All of it is there already; its parts must know that.
            module.cpu()
        if self.is_double:
            # A step may make tensors of its own, such as those that weight a loss.
            torch.set_default_dtype(torch.float64)
        self.trainer.loggers = [NullLogger("")]
        vars(module)["log"] = vars(module)["log_dict"] = ignore
        torch.compiler.set_stance("force_eager")

    def compute(self, batch: Any, *, evaluates: bool, peers: OtherParts | None = None) -> Answer:
        """The losses of a batch; in a fork, unless they can be repeated.

        Args:
            batch: of any number of samples.
            evaluates: whether layers such as dropout do nothing.
            peers: the other parts of the batch; None if there are none.

        Raises:
            ForkError: if the step fails.
        """
        if not self.is_repeatable:
            return call_in_fork(partial(self._compute, batch, evaluates, peers), TIMEOUT_S)
        state = State(self.module)
        answer = self._compute(batch, evaluates, peers)
        state.restore(answer.state)
        return answer

    def compute_in_turn(self, batches: Sequence[Any], *, evaluates: bool) -> list[Answer]:
        """The losses of batches, each of which finds what those before have left behind.

        Raises:
            ForkError: if a step fails.
        """

        def compute() -> list[Answer]:
            return [self._compute(batch, evaluates, None) for batch in batches]

        if not self.is_repeatable:
            return call_in_fork(compute, TIMEOUT_S)
        state = State(self.module)
        answers = compute()
        state.restore(state.find_changed())
        return answers

    def _compute(self, batch: Any, evaluates: bool, peers: OtherParts | None) -> Answer:
        module = self.module
        if self.is_double:
            module.double()
            batch = apply_to_collection(batch, Tensor, to_double)
        state = State(module)
        means: list[losses.Mean] = []
        losses.begin_batch(peers=peers, means=means)
        before = state_of_python()
        with mode_of(module, evaluates), ConstantNumbers() as numbers:
            found = self._train_on(batch)
        return Answer(
            [float(loss.detach()) for loss in found],
            peers.own if peers else [],
            numbers.num_drawn > 0 or state_of_python() != before,
            len(found) == 1 and losses.is_one_mean(found[0], means),
            state.find_changed(),
        )

    def _train_on(self, batch: Any) -> list[Tensor]:
        """The losses that the step of a batch would minimize."""
        module = self.module
        found: list[Any] = []
        # With manual optimization the step hands each loss to this method.
        vars(module)["manual_backward"] = lambda loss, *args, **options: found.append(loss)
        args = [batch, self.batch_idx]
        if not is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2):
            args.pop()
        output = module.training_step(*args)
        if module.automatic_optimization:
            found = [output["loss"] if isinstance(output, Mapping) else output]
        return [loss for loss in found if loss is not None]


@contextmanager
def mode_of(module: nn.Module, evaluates: bool) -> Iterator[None]:
    """Let a module evaluate within this block, or be as it is."""
    modes = [(part, part.training) for part in module.modules()]
    if evaluates:
        module.eval()
    yield
    for part, mode in modes:
        part.training = mode


def state_of_python() -> str:
    """The states of the generators of Python and NumPy; as text, because arrays have no truth."""
    return str((random.getstate(), np.random.get_state()))


def ignore(*args: Any, **options: Any) -> None:
    """Log nothing."""


class State:
    """The buffers of a module, and its attributes that are numbers, before and after a step.

    Metrics are left out, which add up over the ranks, and batch norm, which has a finding of its
    own.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places: dict[str, tuple[nn.Module, str]] = {}
        self._before: dict[str, Any] = {}
        for path, part in module.named_modules():
            if isinstance(part, (Metric, nn.SyncBatchNorm, *BATCH_NORMS)):
                continue
            buffers = dict(part.named_buffers(recurse=False))
            for name, value in {**vars(part), **buffers}.items():
                is_number = isinstance(value, Tensor | float | int) and not name.startswith("_")
                if is_number or name in buffers:
                    full_name = f"{path}.{name}".lstrip(".")
                    self._places[full_name] = part, name
                    self._before[full_name] = copy_of(value)

    def find_changed(self) -> dict[str, Tensor]:
        """The values that are other ones now, by name."""
        changed = {}
        for name, (part, attribute) in self._places.items():
            value = torch.as_tensor(getattr(part, attribute)).detach()
            if not is_equal(value, torch.as_tensor(self._before[name])):
                changed[name] = value.clone()
        return changed

    def restore(self, names: Iterable[str]) -> None:
        """Put the first values back."""
        for name in names:
            part, attribute = self._places[name]
            setattr(part, attribute, copy_of(self._before[name]))


def copy_of(value: Any) -> Any:
    """A number, or a tensor with other memory."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def is_equal(ours: Tensor | None, theirs: Tensor, tolerance: float = 0.0) -> bool:
    """Whether two tensors have the same shape, and values that are close; nan is equal to nan."""
    if ours is None or ours.shape != theirs.shape:
        return False
    ours, theirs = ours.double(), theirs.double()
    return torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


def leave_out(metric: Metric) -> None:
    """Let a metric count nothing, and stay where it is."""
    vars(metric).update(update=ignore, forward=ignore, _apply=lambda *args: metric)


class ConstantNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this block torch draws the same number for each sample, of whatever generator.

    So the loss of a step that draws some is a mean over its samples, or not, as without them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_drawn = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation, and replace the random numbers that it has drawn."""
        drawn = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags or not isinstance(drawn, Tensor):
            return drawn
        self.num_drawn += 1
        if func.overloadpacket is torch.ops.aten.randperm:
            return drawn.copy_(torch.arange(len(drawn)))
        # 0 is an index of whatever is chosen from, and one of two outcomes.
        return drawn.fill_(0.5 if drawn.is_floating_point() else 0)


@contextmanager
def gathered_weights(module: nn.Module) -> Iterator[bool]:
    """Let each rank have the whole weights within this block, if they are sharded.

    Every rank must enter it. Gives whether they are whole: they may be too large for one rank.
    """
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    if sharded and sum(parameter.numel() for parameter in module.parameters()) > MAX_GATHERED:
        yield False
        return
    for part in sharded:
        part.unshard()
    try:
        # Some may be sharded in another way, such as by columns.
        yield not any(isinstance(parameter, DTensor) for parameter in module.parameters())
    finally:
        for part in sharded:
            part.reshard()


def copy_to_cpu(module: nn.Module) -> dict[str, Tensor]:
    """All tensors of a module by name, if some are on another device: a fork has only the CPU."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    # Those that are plain attributes too, such as weights of a loss that were moved by hand.
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                named[f"{path}.{name}".lstrip(".")] = value
    if all(tensor.is_cpu for tensor in named.values()):
        return {}
    return {name: tensor.detach().cpu() for name, tensor in named.items()}


def to_double(value: Any) -> Any:
    """A tensor in 64 bits, if it holds floating point numbers."""
    return value.double() if value.is_floating_point() else value
