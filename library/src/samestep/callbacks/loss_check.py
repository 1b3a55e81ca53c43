"""Finds out before the first step whether any number of ranks would take the same one."""

import copy
import dataclasses
import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import Metric

from samestep import losses
from samestep.callbacks.notes import join_names, print_note
from samestep.data.loaders import orders_of
from samestep.data.sampler import GlobalBatchSampler
from samestep.errors import ConfigError
from samestep.option_names import option, setting
from samestep.ranks import compat, process_group
from samestep.ranks.forked import ForkError, call_in_fork, can_fork
from samestep.tracker import NullLogger

log = logging.getLogger(__name__)

LOSS, RANDOM, BATCH_NORM = "loss", "random_numbers", "batch_norm"
KNOWN = (LOSS, RANDOM, BATCH_NORM)
"""What a run can be allowed to do differently on another number of ranks."""
BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout
MAX_SAMPLES = 16  # of a slice, whose loss is computed several times
MAX_GATHERED = 2**28  # weights of a sharded model
TIMEOUT_S = 30.0  # seconds
MAX_PASSES = 4  # each completes what the one before has given
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative difference of losses that are equal but for the order of their sums."""


class CannotSplit(Exception):
    """A batch that is not made of one entry for each sample."""


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


class Finding(NamedTuple):
    """Why ranks would take another step."""

    kind: str
    """One of ``KNOWN``."""
    facts: str
    """What was measured, or where."""
    is_of_ranks: bool = True
    """False: it is the accumulated batches, and not the ranks, that make another step."""


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
    """Parameters and buffers on the CPU, by name, if the model is on another device."""
    is_double: bool = False
    is_repeatable: bool = False
    """Whether a step leaves nothing behind that the loss of the next one depends on."""

    def prepare(self) -> None:
        """Let a step log nothing, write nothing and need no GPU, from now on in this process."""
        module = self.module
        compat.forget_sharding(module)
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
        compute = partial(self._compute, batch, evaluates, peers)
        return compute() if self.is_repeatable else call_in_fork(compute, TIMEOUT_S)

    def compute_twice(self, batch: Any) -> tuple[Answer, Answer]:
        """The losses of a batch, in evaluation mode and in a fork, and those of a second step.

        Raises:
            ForkError: if the step fails.
        """
        again = dataclasses.replace(self, is_repeatable=True)

        def compute() -> tuple[Answer, Answer]:
            return again.compute(batch, evaluates=True), again.compute(batch, evaluates=True)

        return call_in_fork(compute, TIMEOUT_S)

    def _compute(self, batch: Any, evaluates: bool, peers: OtherParts | None) -> Answer:
        module = self.module
        modes = {part: part.training for part in module.modules()}
        if evaluates:
            module.eval()
        if self.is_double:
            module.double()
            batch = apply_to_collection(batch, Tensor, to_double)
        found: list[Any] = []
        # With manual optimization the step hands each loss to this method.
        vars(module)["manual_backward"] = lambda loss, *args, **options: found.append(loss)
        args = [batch, self.batch_idx]
        if not is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2):
            args.pop()
        current = losses.begin_batch(peers=peers)
        before = np.random.get_state(), random.getstate()
        with ConstantNumbers() as numbers:
            output = module.training_step(*args)
        # As text, because NumPy's arrays have no truth.
        is_random = numbers.num_drawn > 0 or str(before) != str(
            (np.random.get_state(), random.getstate())
        )
        for part, mode in modes.items():
            part.training = mode
        if module.automatic_optimization:
            found = [output["loss"] if isinstance(output, Mapping) else output]
        found = [loss for loss in found if loss is not None]
        is_one_mean = len(found) == 1 and losses.is_one_mean(found[0], current.means)
        return Answer(list(map(float, found)), peers.own if peers else [], is_random, is_one_mean)


def ignore(*args: Any, **options: Any) -> None:
    """Log nothing."""


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
def gathered_weights(module: nn.Module) -> Iterator[None]:
    """Let each rank have the whole weights within this block, if they are sharded.

    Raises:
        CannotSplit: if they are too large for that.
    """
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    size = sum(parameter.numel() for parameter in module.parameters())
    if sharded and size > MAX_GATHERED:
        raise CannotSplit(f"the model is sharded, and {size} weights are too many for one rank")
    for part in sharded:
        part.unshard()
    try:
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise CannotSplit("the model is sharded in another way")
        yield
    finally:
        for part in sharded:
            part.reshard()


def copy_to_cpu(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, if they are on another device: a fork has only the CPU."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if all(tensor.is_cpu for tensor in named.values()):
        return {}
    return {name: tensor.detach().cpu() for name, tensor in named.items()}


def explain(finding: Finding, num_ranks: int) -> str:
    """The note for a finding."""
    differ = f"So on {num_ranks} ranks the steps differ from those on one rank"
    if not finding.is_of_ranks:
        differ = "So accumulated batches make other steps than whole batches"
    allowed = f"{setting('allow', f'[{finding.kind}]')} accepts it"
    if finding.kind == LOSS:
        return (
            f"Note: the loss is not a mean over the samples: it is {finding.facts}. {differ}. "
            f"samestep.mean and samestep.gather_batch help (docs/losses.md); {allowed}"
        )
    if finding.kind == RANDOM:
        return (
            "Note: each rank draws random numbers of its own in a training step"
            f"{finding.facts}. {differ}, though neither is better; {allowed}"
        )
    return (
        f"Note: {finding.facts} each slice of a batch by itself. {differ}. Group norm and layer "
        f"norm do not, nor does {setting('sync_batchnorm', True)} on GPUs; {allowed}"
    )


class LossCheck(L.Callback):
    """Names what would make the steps on several ranks differ from those on one.

    Before the first step of a process the loss of a slice is computed as a whole, and as the mean
    of its parts, as ranks would. If they differ, the loss is no mean over the samples, and a note
    names the remedy. So it does for layers that normalize by the batch, and for random numbers,
    which each rank draws for itself. A batch that is cut for accumulation is checked too.

    Everything is computed in a fork of this process, on the CPU, from at most ``MAX_SAMPLES``
    samples: no attribute, metric, buffer, generator or log of the run changes. It is left out where
    that is impossible: models that are sharded, batches whose samples cannot be told apart.
    logs/rank-0.log says so then.

    Args:
        allow: the findings that are known, and are not printed: ``loss``, ``random_numbers``,
            ``batch_norm``.

    Raises:
        ConfigError: if ``allow`` has another name.
    """

    def __init__(self, allow: Sequence[str] = ()) -> None:
        for name in allow:
            if name not in KNOWN:
                raise ConfigError(
                    f"{option('allow')}: {name} is not known; choose from {', '.join(KNOWN)}"
                )
        self.allow = tuple(allow)
        self._has_checked = False

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Check the first batch of this process."""
        if self._has_checked:
            return
        self._has_checked = True
        lengths = lengths_of_slices(trainer, batch_idx)
        if lengths is None or set(KNOWN).issubset(self.allow):
            return
        own = self._find(trainer, pl_module, batch, lengths, batch_idx)
        found: dict[str, Finding] = {}
        # All ranks look at slices of their own: more samples show more.
        for findings in process_group.gather(own):
            for finding in findings:
                found.setdefault(finding.kind, finding)
        for kind, finding in found.items():
            if kind not in self.allow:
                print_note(trainer, explain(finding, trainer.world_size))

    def _find(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: Any,
        lengths: Sequence[int],
        batch_idx: int,
    ) -> list[Finding]:
        """What this rank has found; nothing if it cannot be found out."""
        slices = [batch]
        # One sample has no parts, so those of all ranks are put together.
        if max(lengths) < 2:
            slices = process_group.gather(move_data_to_device(batch, "cpu"))
        if not can_fork():
            log.info("The loss is not checked: that needs Linux")
            return []
        # A slice that would be empty has a sample too, that of another rank.
        length = max(lengths[trainer.global_rank], 1)
        try:
            samples = first_samples(slices, length)
            with gathered_weights(pl_module):
                step = Step(trainer, pl_module, batch_idx, copy_to_cpu(pl_module))
                return call_in_fork(partial(check_step, step, *samples), TIMEOUT_S)
        except (CannotSplit, ForkError) as error:
            log.info("The loss is not checked: %s", error)
            return []


def lengths_of_slices(trainer: L.Trainer, batch_idx: int) -> tuple[int, ...] | None:
    """Samples of each slice of a batch; None if it is not cut, or into what is unknown."""
    orders = orders_of(trainer)
    if None in orders:
        return None
    if trainer.world_size == 1 and not is_cut_for_accumulation(trainer):
        return None
    # Of several loaders the shorter ones may have begun again.
    index = batch_idx if len(orders) == 1 else 0
    found = {order.lengths(index) for order in orders if order is not None}
    # Of loaders with batches of different sizes it is not known which tensor is of which.
    return found.pop() if len(found) == 1 else None


def is_cut_for_accumulation(trainer: L.Trainer) -> bool:
    """Whether a loader cuts the batch of a step into several, which are accumulated."""
    orders = compat.of_kind(orders_of(trainer), GlobalBatchSampler)
    return any(order.batches_per_step > 1 for order in orders)


# -- The samples of a batch ------------------------------------------------------------------------


def first_samples(slices: Sequence[Any], length: int) -> tuple[Any, int]:
    """Some samples of a batch, on the CPU, and their number.

    Raises:
        CannotSplit: if there is one only, or the batch has no entry for each sample.
    """
    number = min(length, MAX_SAMPLES)
    parts = []
    for slice_ in slices[:MAX_SAMPLES]:
        parts.append(move_data_to_device(take(slice_, length, slice(0, number)), "cpu"))
    number *= len(parts)
    if number < 2:
        raise CannotSplit("the batch has one sample")
    return join(parts), number


def take(batch: Any, length: int, chosen: slice) -> Any:
    """Some samples of a batch of ``length`` samples.

    Raises:
        CannotSplit: if a tensor has not one entry for each sample.
    """
    if isinstance(batch, Tensor | np.ndarray):
        if batch.ndim and batch.shape[0] != length:
            shape = tuple(batch.shape)
            raise CannotSplit(f"a tensor of shape {shape} in a batch of {length} samples")
        return batch[chosen] if batch.ndim else batch
    if isinstance(batch, list | tuple):
        return take_of_list(batch, length, chosen)
    parts = parts_of(batch)
    if parts is None:
        return batch
    taken = {name: take(part, length, chosen) for name, part in parts.items()}
    return with_parts(batch, taken)


def take_of_list(batch: Any, length: int, chosen: slice) -> Any:
    """Some samples of a list: of its parts, such as inputs and targets, or of its entries."""
    is_named = hasattr(batch, "_fields")
    # Such as names of files: nothing in them tells one sample from another.
    has_values = all(isinstance(part, str | bytes | int | float) for part in batch)
    if len(batch) == length and has_values and not is_named:
        return batch[chosen]
    try:
        parts = [take(part, length, chosen) for part in batch]
    except CannotSplit:
        # Such as sequences of different lengths.
        if len(batch) == length and not is_named:
            return batch[chosen]
        raise
    return type(batch)(*parts) if is_named else type(batch)(parts)


def parts_of(batch: Any) -> dict[Any, Any] | None:
    """The parts of a dictionary or object; None for a number, a text and the like."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if hasattr(batch, "__dict__") and not callable(batch):
        return dict(vars(batch))
    return None


def with_parts(batch: Any, parts: dict[Any, Any]) -> Any:
    """A copy of a dictionary or object, with other parts."""
    copied = copy.copy(batch)
    if isinstance(batch, Mapping):
        for name, part in parts.items():
            copied[name] = part
    else:
        vars(copied).update(parts)
    return copied


def join(batches: Sequence[Any]) -> Any:
    """One batch with the samples of several.

    Raises:
        CannotSplit: if their shapes do not fit.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        try:
            return torch.cat(list(batches)) if first.ndim else first
        except RuntimeError as error:
            raise CannotSplit(str(error)) from None
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(join, zip(*batches, strict=True)))
    if isinstance(first, list | tuple):
        return type(first)(map(join, zip(*batches, strict=True)))
    parts = parts_of(first)
    if parts is None:
        return first
    joined = {name: join([parts_of(batch)[name] for batch in batches]) for name in parts}  # type: ignore[index]
    return with_parts(first, joined)


def to_double(value: Any) -> Any:
    """A tensor in 64 bits, if it holds floating point numbers."""
    return value.double() if value.is_floating_point() else value


# -- In the fork -----------------------------------------------------------------------------------


def check_step(step: Step, batch: Any, length: int) -> list[Finding]:
    """What makes the step of this batch differ from those of its parts."""
    step.prepare()
    try:
        # In 64 bits a difference is no rounding.
        precise = dataclasses.replace(step, is_double=True)
        plain, second = precise.compute_twice(batch)
        step = precise
    except ForkError:
        plain, second = step.compute_twice(batch)
    # A fork for each step takes longer than a step.
    step.is_repeatable = plain.losses == second.losses
    if not plain.losses:
        raise CannotSplit("training_step returns no loss")
    findings = []
    is_additive = True
    finding = check_loss(step, batch, length, plain)
    is_additive = finding is None
    if finding is not None:
        findings.append(finding)
    # As it is trained, with dropout and the statistics of the batch.
    trained = step.compute(batch, evaluates=False)
    is_of_ranks = step.trainer.world_size > 1
    # The batches of a step draw the same numbers on any number of ranks, if there is one.
    if trained.is_random and is_of_ranks:
        names = names_of(step.module, *DROPOUTS)
        where = f" ({names})" if names and not plain.is_random else ""
        findings.append(Finding(RANDOM, where))
    norms = names_of(step.module, *BATCH_NORMS)
    if norms:
        findings.append(Finding(BATCH_NORM, f"batch norm ({norms}) normalizes", is_of_ranks))
    elif is_additive and not trained.is_random and not names_of(step.module, nn.SyncBatchNorm):
        difference = compare_with_parts(step, batch, length, trained, evaluates=False)
        if difference is not None:
            seen = "a layer, other than in evaluation, normalizes"
            findings.append(Finding(BATCH_NORM, seen, is_of_ranks))
    return findings


def check_loss(step: Step, batch: Any, length: int, whole: Answer) -> Finding | None:
    """Whether the loss of a batch is another one than that of its parts."""
    if step.trainer.world_size > 1:
        difference = compare_with_parts(step, batch, length, whole)
        if difference is not None:
            return Finding(LOSS, difference)
    # The batches of a step share nothing, but for the denominator of one mean.
    if is_cut_for_accumulation(step.trainer) and not whole.is_one_mean:
        difference = compare_with_parts(step, batch, length, whole, exchanges=False)
        if difference is not None:
            return Finding(LOSS, difference, is_of_ranks=False)
    return None


def compare_with_parts(
    step: Step,
    batch: Any,
    length: int,
    whole: Answer,
    *,
    evaluates: bool = True,
    exchanges: bool = True,
) -> str | None:
    """How the loss of a batch differs from the mean over its parts; None if it does not.

    Args:
        step: computes the losses.
        batch: all samples.
        length: their number.
        whole: the losses of all samples.
        evaluates: whether layers such as dropout do nothing.
        exchanges: whether the parts share what they give to ``mean`` and ``gather_batch``.
    """
    tolerance = TOLERANCE[torch.float64 if step.is_double else torch.float32]
    # Both kinds of parts, because a quantity may be equal in two halves by chance.
    for cut in {length // 2, 1}:
        ranges = [slice(0, cut), slice(cut, length)]
        parts = [take(batch, length, chosen) for chosen in ranges]
        answers = compute_parts(step, parts, evaluates=evaluates, exchanges=exchanges)
        for number, loss in enumerate(whole.losses):
            mean = 0.0
            size = abs(loss)
            for chosen, answer in zip(ranges, answers, strict=True):
                share = (chosen.stop - chosen.start) / length
                mean += share * answer.losses[number]
                size = max(size, abs(answer.losses[number]))
            # The mean over no token is nan, which is close to nothing.
            is_same = abs(mean - loss) <= tolerance * size
            if not is_same and not math.isnan(loss):
                return f"{loss:.6g} for {length} samples, {mean:.6g} for two parts of them"
    return None


def compute_parts(
    step: Step, parts: Sequence[Any], *, evaluates: bool, exchanges: bool
) -> list[Answer]:
    """The losses of the parts of a batch, each of which has what the others give."""
    if not exchanges:
        return [step.compute(part, evaluates=evaluates) for part in parts]
    given: list[list[Tensor]] = []
    answers: list[Answer] = []
    for _ in range(MAX_PASSES):
        answers = []
        for index, part in enumerate(parts):
            peers = OtherParts(index, given)
            answers.append(step.compute(part, evaluates=evaluates, peers=peers))
        before, given = given, [answer.shared for answer in answers]
        # A mean may depend on another one, which has its value only in the second pass.
        if are_equal(before, given):
            break
    return answers


def are_equal(ours: Sequence[Sequence[Tensor]], theirs: Sequence[Sequence[Tensor]]) -> bool:
    """Whether all parts have given the same."""
    if not any(theirs):
        return True
    if len(ours) != len(theirs):
        return False
    for own, other in zip(ours, theirs, strict=True):
        if len(own) != len(other) or not all(map(torch.equal, own, other)):
            return False
    return True


def names_of(module: nn.Module, *kinds: type[nn.Module]) -> str:
    """The names of the layers of these kinds that are not in evaluation, in a sentence."""
    names = []
    for name, part in module.named_modules():
        if isinstance(part, kinds) and part.training:
            names.append(name)
    return join_names(names)
