"""Finds out before the first step whether another number of ranks would take another one.

No effect shows that later: steps of another mean look like any others.
"""

import gc
import logging
import math
import multiprocessing
import os
import random
import resource
import signal
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import Metric

from samestep import losses
from samestep.callbacks.notes import join_names, print_note
from samestep.callbacks.rng import SeedSteps, isolated_generators
from samestep.data.loaders import orders_of
from samestep.data.sampler import GlobalBatchSampler
from samestep.errors import ConfigError
from samestep.option_names import option, setting
from samestep.ranks import compat, environment
from samestep.ranks.strategies import is_sharded
from samestep.run_spec import BATCH_NORM, KNOWN_DIFFERENCES, LOSS, RANDOM, RunSpec
from samestep.tracker import NullLogger

log = logging.getLogger(__name__)

BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout
MAX_SAMPLES = 16  # of a slice, whose loss is computed
TOLERANCE = 1e-5  # of a loss: more than rounding, also in 32 bits
TIMEOUT_S = 30.0  # seconds, for all losses
OPEN_FILES = Path("/proc/self/fd")  # a link for each open file of this process
WHILE_MOVED = " (in a hook that moves the batch to the device)"

NOTES = {
    LOSS: "the loss is not a mean over the samples: it is {}. samestep.mean(losses, weights) is "
    "the mean over all ranks, for class weights and masks, and samestep.gather_batch(tensor) the "
    "whole batch, for losses that compare samples",
    RANDOM: "each rank draws random numbers of its own in a training step{}, which train as well",
    BATCH_NORM: "batch norm{} normalizes each slice of a batch by itself. Group norm and layer "
    "norm do not",
}


def explain(kind: str, facts: str) -> str:
    """The note about a finding."""
    return (
        f"Note: {NOTES[kind].format(facts)}. As it is, the steps differ from those of whole "
        f"batches on one rank; {setting('virtual_ranks', 'V')} takes the same ones on any number "
        f"of ranks, to the bit, and {setting('allow', f'[{kind}]')} silences this note"
    )


def callback(spec: RunSpec) -> L.Callback | None:
    """``LossCheck``, if batches are cut, and not into slices that are the same in every run."""
    # Virtual ranks are the slices of every run.
    is_fixed = spec.virtual_ranks is not None
    is_cut = environment.world_size() > 1 or spec.accumulates
    return LossCheck(spec.allow) if is_cut and not is_fixed else None


class LossCheck(L.Callback):
    """Names what would make the steps on several ranks differ from those on one.

    Before the first step of a process rank zero computes the loss of its slice, and the mean of the
    losses of two parts of it, as two ranks would. If they differ, the loss is no mean over the
    samples. Each is computed in a fork of this process, on the CPU: no attribute, metric, buffer,
    generator, file or log of the run changes. Batch norm and dropout are named by the layers of the
    module, also where the loss cannot be computed; logs/rank-0.log says why it cannot.

    Args:
        allow: the findings that are known, and are not printed: ``loss``, ``random_numbers``,
            ``batch_norm``.

    Raises:
        ConfigError: if ``allow`` has another name.
    """

    def __init__(self, allow: Sequence[str] = ()) -> None:
        for name in allow:
            if name not in KNOWN_DIFFERENCES:
                known = ", ".join(KNOWN_DIFFERENCES)
                raise ConfigError(f"{option('allow')}: {name} is not known; choose from {known}")
        self.allow = set(allow)
        self._has_checked = False

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Check the first batch of this process."""
        has_checked, self._has_checked = self._has_checked, True
        if has_checked or not trainer.is_global_zero or self.allow.issuperset(KNOWN_DIFFERENCES):
            return
        if not cuts_batches(trainer):
            return
        found = find_layers(pl_module)
        # Before the losses are computed, because that might draw some.
        if draws_while_moved(trainer, batch_idx):
            found[RANDOM] = WHILE_MOVED
        try:
            found = compare_losses(trainer, pl_module, batch, batch_idx) | found
        except Exception as reason:
            # A batch, a module and its weights are the user's: they may raise anything, and a
            # check must not end a run that would have trained.
            log.info("The loss is not checked: %r", reason)
        if trainer.world_size == 1:
            # The batches of a step draw the same numbers on any number of ranks.
            found.pop(RANDOM, None)
        for kind, facts in found.items():
            if kind not in self.allow:
                print_note(trainer, explain(kind, facts))


def cuts_batches(trainer: L.Trainer) -> bool:
    """Whether a batch is cut: where Lightning distributes a loader each rank has its own."""
    has_parts = trainer.world_size > 1 or accumulates(trainer)
    return has_parts and None not in orders_of(trainer)


def accumulates(trainer: L.Trainer) -> bool:
    """Whether a loader cuts the batch of a step into several, which are accumulated."""
    orders = compat.of_kind(orders_of(trainer), GlobalBatchSampler)
    return any(order.batches_per_step > 1 for order in orders)


def find_layers(module: nn.Module) -> dict[str, str]:
    """The names of the layers by which slices of a batch differ from all of it."""
    found = {RANDOM: names_of(module, DROPOUTS), BATCH_NORM: names_of(module, BATCH_NORMS)}
    return {kind: f" ({names})" for kind, names in found.items() if names}


def names_of(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> str:
    """The names of the layers of these kinds that act in training, in a sentence."""
    layers = ((name, part) for name, part in module.named_modules() if isinstance(part, kinds))
    # Dropout(0) draws nothing.
    return join_names([name for name, part in layers if part.training and getattr(part, "p", True)])


def draws_while_moved(trainer: L.Trainer, batch_idx: int) -> bool:
    """Whether hooks such as ``on_after_batch_transfer`` have drawn random numbers."""
    (seeds,) = compat.callbacks_of(trainer, SeedSteps)
    device = trainer.strategy.root_device
    with isolated_generators():
        numbers = draw_numbers(device)
        seeds.seed_step(trainer, batch_idx)
        return draw_numbers(device) != numbers


def draw_numbers(device: torch.device) -> list[float]:
    """A number of each global generator."""
    of_torch = float(torch.rand(())), float(torch.rand((), device=device))
    return [*of_torch, np.random.rand(), random.random()]


# -- The losses of a slice and its parts -----------------------------------------------------------


class CannotCompare(Exception):
    """The loss cannot be computed, or the batch has not one entry for each sample."""


Copies = list[tuple[Tensor, Tensor]]
"""Tensors of a module that are on a device, with copies on the CPU, which is all a fork has."""
Answer = tuple[list[float], bool]
"""The losses of two steps, several with manual optimization; whether random numbers were drawn."""


def compare_losses(
    trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int
) -> dict[str, str]:
    """Whether a step draws random numbers, and what its loss is if that is not a mean.

    Raises:
        CannotCompare: if it cannot be found out.
    """
    length = length_of_slice(trainer, batch_idx)
    num = min(length, MAX_SAMPLES)
    # Two halves are often equal by chance, such as in their weights; 7 and 9 samples are not.
    cut = max(1, (num - 1) // 2)
    whole, *parts = [take(batch, length, slice(*at)) for at in ((0, num), (0, cut), (cut, num))]
    # A step that keeps something of its samples makes another loss of the next one.
    turns = [(part, whole) for part in (whole, *parts)]
    step = partial(compute_losses, trainer, module, batch_idx, copies_on_cpu(module))
    deadline = time.monotonic() + TIMEOUT_S
    try:
        answers = [call_in_fork(partial(step, turn, torch.float64), deadline) for turn in turns]
    except CannotCompare:
        # Such as a step that names its type of numbers itself.
        answers = [call_in_fork(partial(step, turn, torch.float32), deadline) for turn in turns]
    (of_whole, is_random), (of_a, _), (of_b, _) = answers
    found = {RANDOM: ""} if is_random else {}
    for number, (loss, a, b) in enumerate(zip(of_whole, of_a, of_b, strict=True)):
        mean = (cut * a + (num - cut) * b) / num
        tolerance = TOLERANCE * max(abs(loss), abs(a), abs(b))
        # A part without a valid sample may be nan, which is close to nothing.
        if math.isfinite(loss) and not math.isclose(mean, loss, rel_tol=0, abs_tol=tolerance):
            of = "for" if number < len(of_whole) // 2 else "after a step with"
            found.setdefault(LOSS, f"{loss:.6g} {of} {num} samples, {mean:.6g} {of} two parts")
    return found


def length_of_slice(trainer: L.Trainer, batch_idx: int) -> int:
    """The number of samples of our slice.

    Raises:
        CannotCompare: if it has no parts, or no loss of its own.
    """
    order, *others = orders_of(trainer)
    if others or order is None:
        raise CannotCompare("of several loaders it is not known how many samples a batch has")
    if is_sharded(trainer.strategy):
        raise CannotCompare("the model is sharded")
    # Apple's libraries end a fork of a process with threads, or hang in it.
    if not OPEN_FILES.is_dir():
        raise CannotCompare("that needs Linux")
    length = order.lengths(batch_idx)[trainer.global_rank]
    if length < 2:
        raise CannotCompare("a slice of one sample has no parts")
    return length


def take(batch: Any, length: int, chosen: slice) -> Any:
    """Some samples of a batch, on the CPU.

    Raises:
        CannotCompare: if a tensor has not one entry for each of ``length`` samples.
    """

    def cut(tensor: Tensor) -> Tensor:
        if tensor.ndim and len(tensor) != length:
            raise CannotCompare(f"{length} samples, and a tensor of shape {tuple(tensor.shape)}")
        return (tensor[chosen] if tensor.ndim else tensor).cpu()

    return apply_to_collection(batch, Tensor, cut)


def copies_on_cpu(module: nn.Module) -> Copies:
    """The tensors of a module that are on a device, with copies."""
    tensors = [*module.parameters(), *module.buffers()]
    for part in module.modules():
        # Such as weights of a loss that were moved by hand.
        tensors += [value for value in vars(part).values() if isinstance(value, Tensor)]
    return [(tensor, tensor.detach().cpu()) for tensor in tensors if not tensor.is_cpu]


# -- In the fork -----------------------------------------------------------------------------------


def compute_losses(
    trainer: L.Trainer, module: Any, batch_idx: int, copies: Copies, turn: Any, dtype: torch.dtype
) -> Answer:
    """The losses of training steps that log nothing, write nothing and need no GPU."""
    prepare(module, copies, dtype)
    trainer.loggers = [NullLogger("")]
    found: list[Any] = []
    # With manual optimization the step hands each loss to this method.
    vars(module)["manual_backward"] = lambda loss, *args, **options: found.append(loss)
    before = str((random.getstate(), np.random.get_state()))
    shared, numbers = losses.begin_batch(), ConstantNumbers()
    for batch in apply_to_collection(turn, Tensor, partial(convert, dtype)):
        args = [batch, batch_idx]
        if not is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2):
            args.pop()
        with numbers:
            output = module.training_step(*args)
        if module.automatic_optimization:
            found.append(output["loss"] if isinstance(output, Mapping) else output)
    # Those of NumPy are others for each sample, which make another loss of the parts.
    draws_others = before != str((random.getstate(), np.random.get_state()))
    # What is a mean over all ranks is that over all parts, but not over accumulated batches.
    is_exact = shared.is_shared and not accumulates(trainer)
    values = [] if draws_others or is_exact else [float(loss.detach()) for loss in found]
    return values, numbers.num_drawn > 0 or draws_others


def prepare(module: nn.Module, copies: Copies, dtype: torch.dtype) -> None:
    """Let a module log nothing, count nothing and compute on the CPU, with numbers of this type."""
    vars(module).update(log=ignore, log_dict=ignore)
    for tensor, copy in copies:
        tensor.data = copy
    for part in module.modules():
        if isinstance(part, Metric):
            # No loss needs them, and what they have added up may be on a device.
            vars(part).update(update=ignore, forward=ignore, _apply=ignore)
        elif isinstance(part, (nn.SyncBatchNorm, *BATCH_NORMS)):
            # A note of its own is about these.
            part.eval()
    module.to("cpu", dtype)
    # A step may make tensors of its own, such as those that weight a loss.
    torch.set_default_dtype(dtype)
    torch.compiler.set_stance("force_eager")


def ignore(*args: Any, **options: Any) -> None:
    """Log nothing, count nothing."""


def convert(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """A copy, which a step may change, with numbers of this type if they are floating point."""
    return tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)


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


def call_in_fork(function: Callable[[], Answer], deadline: float) -> Answer:
    """What ``function`` returns in a fork of this process.

    Raises:
        CannotCompare: if it raises an error, or does not end in time.
    """
    context = multiprocessing.get_context("fork")
    receives, sends = context.Pipe(duplex=False)
    fork = context.Process(target=be_fork, args=(function, sends))
    with warnings.catch_warnings():
        # Python 3.12 warns of other threads, none of which the fork has or waits for.
        warnings.simplefilter("ignore", DeprecationWarning)
        fork.start()
    sends.close()
    try:
        if not receives.poll(max(0.0, deadline - time.monotonic())):
            raise CannotCompare(f"it did not end within {TIMEOUT_S:g} s")
        answer: Answer | str = receives.recv()
    finally:
        fork.kill()
        fork.join()
        receives.close()
    if isinstance(answer, str):
        raise CannotCompare(answer)
    return answer


def be_fork(function: Callable[[], Answer], sends: "Connection[Any, Any]") -> None:
    """Send the answer of a function, or its error, and leave no other trace."""
    try:
        # The parent may be killed: without it nothing else would end this process.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S)
        # A collection would close what belongs to the parent.
        gc.disable()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        # What the user's code writes to its own files would be there twice. Pipes have no limit.
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        # Nor may it talk in the place of its rank, such as to a tracker.
        for link in OPEN_FILES.iterdir():
            # The folder itself was open while it was read.
            with suppress(OSError):
                if str(link.readlink()).startswith("socket:"):
                    os.close(int(link.name))
        # The other threads of a pool do not exist here, and an operation would wait for them.
        torch.set_num_threads(1)
        if dist.is_available() and dist.is_initialized():
            dist.GroupMember.WORLD = None
        sends.send(function())
    except BaseException as error:  # whatever a model raises, also to end its process
        sends.send(f"{type(error).__name__}: {error}")
    finally:
        # No clean-up of the parent's: its files, threads and connections are not ours.
        os._exit(0)
