"""Finds out before the first step whether any number of ranks would take the same one."""

import dataclasses
import logging
import math
import operator
import pickle
import random
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from samestep.callbacks.notes import join_names, print_note
from samestep.callbacks.rng import SeedSteps, isolated_generators
from samestep.data.loaders import orders_of
from samestep.data.sampler import GlobalBatchSampler
from samestep.errors import ConfigError
from samestep.option_names import option, setting
from samestep.plugins.forked import ForkError, ForkTimeout, call_in_fork, can_fork
from samestep.plugins.samples import CannotSplit, join, take
from samestep.plugins.step_probe import (
    BATCH_NORMS,
    TIMEOUT_S,
    Answer,
    OtherParts,
    Step,
    copy_to_cpu,
    gathered_weights,
    is_equal,
)
from samestep.ranks import compat, devices, environment, process_group
from samestep.run_spec import BATCH_NORM, KNOWN_DIFFERENCES, LOSS, RANDOM, STATE, RunSpec

log = logging.getLogger(__name__)

DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout
MAX_SAMPLES = 16  # of a slice, whose loss is computed several times
MAX_PASSES = 4  # each completes what the one before has given


class Finding(NamedTuple):
    """Why ranks would take another step."""

    kind: str
    """One of ``KNOWN_DIFFERENCES``."""
    facts: str
    """What was measured, or where."""
    is_of_ranks: bool = True
    """False: it is the accumulated batches, and not the ranks, that make another step."""


NOTES = {
    LOSS: "Note: the loss is not a mean over the samples: it is {facts}. {differ}. "
    "samestep.mean(losses, weights) is the mean over all ranks, for class weights and masks, and "
    "samestep.gather_batch(tensor) the whole batch, for losses that compare samples; {allowed}",
    RANDOM: "Note: each rank draws random numbers of its own in a training step{facts}. {differ}, "
    "though neither is better; {allowed}",
    STATE: "Note: a training step changes {facts} by the samples that it has. {differ}. "
    "samestep.gather_batch(tensor) gives it those of all ranks; {allowed}",
    BATCH_NORM: "Note: {facts} each slice of a batch by itself. {differ}. Group norm and layer "
    "norm do not, nor does {sync} on GPUs; {allowed}",
}


def explain(finding: Finding, num_ranks: int) -> str:
    """The note for a finding."""
    differ = f"So on {num_ranks} ranks the steps differ from those on one rank"
    if not finding.is_of_ranks:
        differ = "So accumulated batches make other steps than whole batches"
    return NOTES[finding.kind].format(
        facts=finding.facts,
        differ=differ,
        allowed=f"{setting('allow', f'[{finding.kind}]')} accepts it",
        sync=setting("sync_batchnorm", True),
    )


def callback(spec: RunSpec) -> L.Callback | None:
    """``LossCheck``, if a run cuts batches: over ranks, or into several that are accumulated."""
    cuts_batches = environment.world_size() > 1 or spec.accumulates or spec.split_batches
    return LossCheck(spec.allow) if cuts_batches else None


WHILE_MOVED = " (in a hook that moves the batch to the device)"
"""Where random numbers are drawn that change the samples."""


class LossCheck(L.Callback):
    """Names what would make the steps on several ranks differ from those on one.

    Before the first step of a process the loss of a slice is computed as a whole, and as the mean
    of its parts, as ranks would. If they differ, the loss is no mean over the samples, and a note
    names the remedy. So it does for layers that normalize by the batch, and for random numbers,
    which each rank draws for itself, in the step or while the batch is moved. A batch that is cut
    for accumulation is checked too.

    Everything is computed in a fork of this process, on the CPU, from at most ``MAX_SAMPLES``
    samples: no attribute, metric, buffer, generator or log of the run changes. It is left out where
    that is impossible: sharded models that are too large for one rank, batches whose samples cannot
    be told apart. logs/rank-0.log says so then.

    Args:
        allow: the findings that are known, and are not printed: ``loss``, ``random_numbers``,
            ``batch_norm``, ``state``.

    Raises:
        ConfigError: if ``allow`` has another name.
    """

    def __init__(self, allow: Sequence[str] = ()) -> None:
        for name in allow:
            if name not in KNOWN_DIFFERENCES:
                raise ConfigError(
                    f"{option('allow')}: {name} is not known; choose from "
                    f"{', '.join(KNOWN_DIFFERENCES)}"
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
        if lengths is None or set(KNOWN_DIFFERENCES).issubset(self.allow):
            return
        # First of all, because the check itself might draw some.
        is_augmented = draws_while_moved(trainer, batch_idx)
        own = self._find(trainer, pl_module, batch, lengths, batch_idx)
        if is_augmented:
            own.append(Finding(RANDOM, WHILE_MOVED))
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
        # One sample has no parts, so those of all ranks are put together.
        slices = gather_slices(batch) if max(lengths) < 2 else [batch]
        if not can_fork():
            log.info("The loss is not checked: that needs Linux")
            return []
        # A slice that would be empty has a sample too, that of another rank.
        length = max(lengths[trainer.global_rank], 1)
        # All ranks take part in this, also one whose slice cannot be split.
        with gathered_weights(pl_module) as are_whole:
            if not are_whole:
                log.info("The loss is not checked: the model is sharded, and too large for a rank")
                return []
            try:
                samples = first_samples(slices, length)
                step = Step(trainer, pl_module, batch_idx, copy_to_cpu(pl_module))
                return check_in_fork(step, *samples)
            except (CannotSplit, ForkError) as error:
                log.info("The loss is not checked: %s", error)
            except Exception:
                # A batch, a module and its weights are the user's: they may raise anything, and a
                # check must not end a run that would have trained.
                log.info("The loss is not checked", exc_info=True)
        return []


def draws_while_moved(trainer: L.Trainer, batch_idx: int) -> bool:
    """Whether hooks such as ``on_after_batch_transfer`` have drawn numbers that ranks draw too."""
    # The check itself begins with a batch that has been moved.
    if trainer.world_size == 1:
        return False
    (seeds,) = compat.callbacks_of(trainer, SeedSteps)
    now = states_of_generators()
    with isolated_generators():
        seeds.seed_step(trainer, batch_idx)
        return states_of_generators() != now


def states_of_generators() -> tuple[bytes, ...]:
    """The states of the global generators of torch, NumPy and Python, to compare them."""
    states = [
        torch.get_rng_state().numpy().tobytes(),
        pickle.dumps(np.random.get_state()),
        pickle.dumps(random.getstate()),
    ]
    gpu = devices.module_of_gpu()
    if gpu is not None:
        states.append(gpu.get_rng_state().numpy().tobytes())
    return tuple(states)


def gather_slices(batch: Any) -> list[Any]:
    """The slices of all ranks; of this rank only, if its batch cannot be sent to others."""
    try:
        return process_group.gather(move_data_to_device(batch, "cpu"))
    except (pickle.PicklingError, AttributeError, TypeError):
        # It is of the same kind on every rank, so none waits for the others.
        return [batch]


def lengths_of_slices(trainer: L.Trainer, batch_idx: int) -> tuple[int, ...] | None:
    """Samples of each slice of a batch; None if it is not cut, or into what is unknown."""
    orders = orders_of(trainer)
    if trainer.world_size == 1 and not is_cut_for_accumulation(trainer):
        return None
    found: set[tuple[int, ...]] = set()
    for order in orders:
        if order is None:
            return None
        # Of several loaders the shorter ones may have begun again.
        found.add(order.lengths(batch_idx if len(orders) == 1 else 0))
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


# -- In the fork -----------------------------------------------------------------------------------


def check_in_fork(step: Step, batch: Any, length: int) -> list[Finding]:
    """What makes the step of this batch differ from those of its parts, found in a fork.

    Raises:
        ForkError: if the step fails.
    """
    try:
        found = call_in_fork(partial(check_step, step, batch, length), TIMEOUT_S)
    except ForkTimeout:
        raise
    except ForkError:
        # Such as a model that names its type of numbers itself.
        step = dataclasses.replace(step, is_double=False)
        found = call_in_fork(partial(check_step, step, batch, length), TIMEOUT_S)
    if found is None:
        # A fork for each step takes longer than a step, so it is the second try.
        step = dataclasses.replace(step, is_repeatable=False)
        found = call_in_fork(partial(check_step, step, batch, length), TIMEOUT_S)
    assert found is not None
    return found


def check_step(step: Step, batch: Any, length: int) -> list[Finding] | None:
    """What makes the step of this batch differ from those of its parts.

    None if the steps must be computed in forks of their own, and are not yet.
    """
    step.prepare()
    plain = compute_twice(step, batch, evaluates=True)
    if plain is None:
        return None
    if not plain.losses:
        raise CannotSplit("training_step returns no loss")
    findings = check_loss(step, batch, length, plain)
    # As it is trained, with dropout and the statistics of the batch. Not before: batch norm would
    # evaluate by other statistics from here on.
    trained = compute_twice(step, batch, evaluates=False)
    if trained is None:
        return None
    if trained.state:
        findings += check_state(step, batch, length, trained)
    # The batches of a step draw the same numbers on any number of ranks, if there is one.
    if trained.is_random and step.is_on_ranks:
        names = names_of(step.module, *DROPOUTS)
        where = f" ({names})" if names and not plain.is_random else ""
        findings.append(Finding(RANDOM, where))
    return findings + check_layers(step, batch, length, trained, findings)


def compute_twice(step: Step, batch: Any, *, evaluates: bool) -> Answer | None:
    """The losses of the batch; None if they depend on what an earlier step leaves behind."""
    first, second = step.compute_in_turn([batch, batch], evaluates=evaluates)
    if step.is_repeatable and first.losses != second.losses:
        return None
    return first


def check_layers(
    step: Step, batch: Any, length: int, trained: Answer, known: Sequence[Finding]
) -> list[Finding]:
    """Whether a layer normalizes by the batch, such as batch norm."""
    norms = names_of(step.module, *BATCH_NORMS)
    if norms:
        return [Finding(BATCH_NORM, f"batch norm ({norms}) normalizes", step.is_on_ranks)]
    # What is known already would be found again, and so would what is synchronized on GPUs.
    if known or trained.is_random or names_of(step.module, nn.SyncBatchNorm):
        return []
    if compare_with_parts(step, batch, length, trained, evaluates=False) is None:
        return []
    seen = "a layer, other than in evaluation, normalizes"
    return [Finding(BATCH_NORM, seen, step.is_on_ranks)]


def check_loss(step: Step, batch: Any, length: int, whole: Answer) -> list[Finding]:
    """Whether the loss of a batch is another one than that of its parts."""
    if step.is_on_ranks:
        difference = compare_with_parts(step, batch, length, whole)
        if difference is not None:
            return [Finding(LOSS, difference)]
    # The batches of a step share nothing, but for the denominator of one mean.
    if is_cut_for_accumulation(step.trainer) and not whole.is_one_mean:
        difference = compare_with_parts(step, batch, length, whole, exchanges=False)
        if difference is not None:
            return [Finding(LOSS, difference, is_of_ranks=False)]
    return []


def check_state(step: Step, batch: Any, length: int, whole: Answer) -> list[Finding]:
    """Whether parts of a batch leave other buffers and attributes behind than the whole.

    What the loss does not depend on may differ: an attribute makes no difference then. Buffers
    become their mean over the ranks at the end of an epoch, which must be that of the whole batch.
    """
    shares, parts = cut_in_two(batch, length, length // 2)
    if step.is_on_ranks:
        answers = compute_parts(step, parts, evaluates=False, exchanges=True)
        names = find_unequal(step, whole.state, [answer.state for answer in answers], shares)
        if names:
            return [Finding(STATE, join_names(names))]
    # What the loss does not depend on may be changed by each batch of a step.
    if is_cut_for_accumulation(step.trainer) and not step.is_repeatable:
        names = find_left_otherwise(step, parts, whole.state)
        if names:
            return [Finding(STATE, join_names(names), is_of_ranks=False)]
    return []


def find_left_otherwise(step: Step, parts: Sequence[Any], whole: Mapping[str, Tensor]) -> list[str]:
    """The names of what two batches in turn leave behind otherwise than the whole one."""
    first, second = step.compute_in_turn(parts, evaluates=False)
    left_behind = first.state | second.state
    names = []
    for name, value in whole.items():
        if not is_equal(left_behind.get(name), value, step.tolerance):
            names.append(name)
    return names


def find_unequal(
    step: Step,
    whole: Mapping[str, Tensor],
    of_parts: Sequence[Mapping[str, Tensor]],
    shares: Sequence[float],
) -> list[str]:
    """The names of what the parts have other values of than the whole, where that matters."""
    buffers = dict(step.module.named_buffers())
    names = []
    for name, value in whole.items():
        values = [part.get(name) for part in of_parts]
        if all(is_equal(own, value, step.tolerance) for own in values):
            continue
        mean = weighted_mean(values, shares)
        is_harmless = name not in buffers or is_equal(mean, value, step.tolerance)
        if not (step.is_repeatable and is_harmless):
            names.append(name)
    return names


def weighted_mean(values: Sequence[Tensor | None], shares: Sequence[float]) -> Tensor | None:
    """The mean of the values of parts, by their samples; None if they have none."""
    found = [value for value in values if value is not None]
    shapes = {value.shape for value in found}
    if len(found) < len(values) or len(shapes) > 1:
        return None
    weights = torch.tensor(shares, dtype=torch.float64)
    mean: Tensor = torch.tensordot(weights, torch.stack(found).double(), dims=1)
    return mean


def cut_in_two(batch: Any, length: int, cut: int) -> tuple[list[float], list[Any]]:
    """The shares of two parts in the samples of a batch, and the parts."""
    shares: list[float] = []
    parts: list[Any] = []
    for chosen in (slice(0, cut), slice(cut, length)):
        shares.append((chosen.stop - chosen.start) / length)
        parts.append(take(batch, length, chosen))
    return shares, parts


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
    # Several, because a quantity may be equal in two halves by chance.
    for cut in {length // 2, max(length // 3, 1), 1}:
        shares, parts = cut_in_two(batch, length, cut)
        answers = compute_parts(step, parts, evaluates=evaluates, exchanges=exchanges)
        for number, loss in enumerate(whole.losses):
            of_parts = [answer.losses[number] for answer in answers]
            mean = sum(map(operator.mul, shares, of_parts))
            if math.isfinite(loss) and not is_close(mean, loss, of_parts, step.tolerance):
                return f"{loss:.6g} for {length} samples, {mean:.6g} for two parts of them"
    return None


def is_close(mean: float, loss: float, of_parts: Sequence[float], tolerance: float) -> bool:
    """Whether the mean of the losses of parts is the loss of the whole, up to rounding."""
    size = max(map(abs, [loss, *of_parts]))
    # Without a valid sample a part may be nan or infinite, which is close to nothing.
    if not math.isfinite(mean):
        return False
    return abs(mean - loss) <= tolerance * size


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
    if list(map(len, ours)) != list(map(len, theirs)):
        return False
    return all(map(torch.equal, chain(*ours), chain(*theirs)))


def names_of(module: nn.Module, *kinds: type[nn.Module]) -> str:
    """The names of the layers of these kinds that are not in evaluation, in a sentence."""
    names = []
    for name, part in module.named_modules():
        if isinstance(part, kinds) and part.training:
            names.append(name)
    return join_names(names)
