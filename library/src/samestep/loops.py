"""What happens between two steps, and at the end of an epoch.

::

    read       the next batch, from any loader; a signal ends the wait for it
    agree      all ranks continue, save, or save and stop; Lightning has not counted the batch yet
    seed       the random numbers of the step
    step       Lightning moves the batch, counts it, trains and validates
    ...
    end        Lightning finishes the epoch: hooks, schedules, logs, counters; then the run is saved

The first three are ``FitLoop.read_and_agree``, which the fetchers call. So a checkpoint never holds
half a step or half of an epoch's end, and a run that continues takes the next batch as if nothing
had happened. Lightning's own checkpoints are saved from hooks, within both, and its loops repeat or
leave out parts of a step to make up for it (Lightning-AI/pytorch-lightning issues 14699, 19549,
19617).
"""

import copy
import logging
import math
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loops import fit_loop
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import (
    _DataFetcher,
    _DataLoaderIterDataFetcher,
    _PrefetchDataFetcher,
)
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader

from samestep import plugin
from samestep.callbacks.checkpoints import Checkpoints
from samestep.callbacks.data_resume import DataResume
from samestep.callbacks.objects import Objects
from samestep.callbacks.rank_state import RankState, share_buffers
from samestep.callbacks.rng import SeedSteps, before_hooks, seed_hook
from samestep.callbacks.slice_weighting import SliceWeighting
from samestep.data.loaders import order_of_loader, without_states
from samestep.errors import ConfigError, RunError
from samestep.option_names import setting
from samestep.plugin import Plugin
from samestep.ranks import epoch_logs, process_group, stopping, virtual
from samestep.ranks.compat import callbacks_of
from samestep.ranks.process_group import on_rank_zero
from samestep.run import phases

log = logging.getLogger(__name__)

Hook = Callable[..., Any]
Kind = TypeVar("Kind")
Result = TypeVar("Result")

MAX_REHEARSED_S = 5.0  # of the last step, where the next one is computed before a process ends


def install(trainer: L.Trainer) -> None:
    """Let ``trainer`` train and test by the loops of this module, with its callbacks of ours."""
    epoch_logs.install()
    before_hooks(seed_hook)
    old: Any = trainer.fit_loop
    loop = FitLoop(trainer, old.min_epochs, old.max_epochs)
    kind: type[EpochLoop] = EpochLoop
    for each in plugin.find("epoch_loop"):
        kind = each.epoch_loop(kind)
    loop.epoch_loop = kind(trainer, old.epoch_loop.min_steps, old.epoch_loop.max_steps)
    loop.epoch_loop.val_loop = EvaluationLoop(
        trainer, TrainerFn.FITTING, RunningStage.VALIDATING, verbose=False, inference_mode=False
    )
    trainer.validate_loop = EvaluationLoop(
        trainer,
        TrainerFn.VALIDATING,
        RunningStage.VALIDATING,
        inference_mode=trainer.validate_loop.inference_mode,
    )
    validate = loop.epoch_loop.val_loop.run
    loop.epoch_loop.val_loop.run = phases.spend(phases.VALIDATION)(validate)  # type: ignore[method-assign]
    trainer.fit_loop = loop
    trainer.test_loop = TestLoop(
        trainer,
        TrainerFn.TESTING,
        RunningStage.TESTING,
        inference_mode=trainer.test_loop.inference_mode,
    )


class Slices(list[Any]):
    """The batches of a step, if this process has several slices of it."""


class TrainingData:
    """The training loaders as a fetcher reads them.

    Before each batch is read, its random numbers are seeded, and the states that reading may change
    are noted: those of loaders with a state of their own (torchdata's StatefulDataLoader,
    litdata's), and that of a DataModule, which may count what it reads. A checkpoint is saved when
    the next batch has been read, and without a known length one more, so it gets noted states.

    Args:
        loaders: those of the training.
        datamodule: None if there is none.
        resume: seeds, and says how many batches were trained on before an interruption.
        objects: watches what reading changes.
    """

    def __init__(
        self,
        loaders: CombinedLoader,
        datamodule: L.LightningDataModule | None,
        resume: DataResume,
        objects: Objects,
    ) -> None:
        self.loaders = loaders
        self.datamodule = datamodule
        self.resume = resume
        self.objects = objects
        self._is_watched = False  # whether the first batch of this pass is not read yet
        # Without asking them: some loaders begin to read when they are asked for their state.
        self._loaders_have_state = len(without_states(loaders.flattened)) < len(loaders.flattened)
        of_lightning = None, L.LightningDataModule.state_dict
        self._data_has_state = getattr(type(datamodule), "state_dict", None) not in of_lightning
        # One for each batch that was read and not yet trained on, the oldest first.
        self._states: deque[bytes] = deque()
        self._may_be_exhausted = False
        self._loaded: list[dict[str, Any]] = []  # the states of loaders that have not read since
        self._is_continued = False  # whether this pass began with a loaded state
        self.is_read_within_step = False
        """Whether ``training_step`` reads its batches itself: none is read before its step then."""

    def load_states(self, states: list[dict[str, Any]], *, epoch_is_over: bool) -> None:
        """Continue loaders that have a state with those of a checkpoint."""
        if not states:
            return
        # A loader may keep the state that it gets, and change it.
        self._loaded = copy.deepcopy(states)
        self.loaders._load_state_dicts(states)
        if epoch_is_over:
            # In a run that was not interrupted, an iterator of the old epoch exists when that of
            # the next epoch is made.
            iter(self.loaders)
            self._may_be_exhausted = True

    def __iter__(self) -> "TrainingData":
        self._states.clear()
        # Here, because hooks of the user have drawn numbers since the epoch began.
        self.resume.seed_order()
        if self._is_continued:
            self._end_restored_pass()
        self._is_watched = True
        self._watch(partial(iter, self.loaders), is_first_batch=False)
        # A ``training_step`` that reads its batches itself is told which of the epoch each is.
        self.loaders._iterator._idx = self.resume.num_skipped  # type: ignore[union-attr]
        return self

    def _watch(self, read: Callable[[], Any], *, is_first_batch: bool) -> Any:
        """Begin to read, or read the first batch, and notice what this changes."""
        if not self._is_watched:
            return read()
        self._is_watched = not is_first_batch
        self.objects.begin_reading()
        found = read()
        self.objects.end_reading(is_first_batch=is_first_batch)
        return found

    def __len__(self) -> int:
        # Lightning asks for it to tear down, also where an error or a signal came while the
        # iterator was made; a TypeError says that there is none.
        if self.loaders._iterator is None:
            raise TypeError("no iterator was made yet")
        return len(self.loaders)

    def reset(self) -> None:
        """End the iteration, and loader processes with it."""
        self._states.clear()
        self.loaders.reset()

    def __next__(self) -> Any:
        own = virtual.layout().own
        if len(own) == 1:
            return self._watch(partial(self._read_next, own[0]), is_first_batch=True)
        found = self._watch(lambda: [*map(self._read_next, own)], is_first_batch=True)
        return Slices(batch for batch, _, _ in found), *found[0][1:]

    def _read_next(self, number: int) -> Any:
        if number == virtual.layout().own[0]:
            self._read_trained_batches()
            self._note_states()
        self.resume.begin_batch()
        try:
            batch = next(self.loaders)
        except StopIteration:
            self._forget_loaded()
            # No batch belongs to the state that was just noted.
            self._drop_newest()
            if not self._may_be_exhausted:
                raise
            # The state was that of the end of an epoch; this is the first batch of the next one.
            self._may_be_exhausted = False
            self._end_restored_pass()
            iter(self.loaders)
            self._note_states()
            self.resume.begin_batch()
            return next(self.loaders)
        self._may_be_exhausted = False
        self._forget_loaded()
        return batch

    def step_begins(self) -> None:
        """Forget the states of before the batch that is trained on now."""
        if self._states:
            self._states.popleft()

    def states_before_step(self) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """The states of the loaders and of the DataModule before the next step reads its batch.

        The second is None if the DataModule says nothing, or has read nothing since.
        """
        # The oldest belongs to the batch that comes next. Without one, nothing was read ahead.
        if self._states:
            states: tuple[list[dict[str, Any]], dict[str, Any] | None]
            states = pickle.loads(self._states[0])
            return states
        return self._states_of_loaders(), None

    def _states_of_loaders(self) -> list[dict[str, Any]]:
        # A loader that has not read since it got a state may not know yet what that state says:
        # litdata's writes the epoch of before into it.
        return self._loaded or self.loaders._state_dicts()

    def _end_restored_pass(self) -> None:
        self._is_continued = False
        for loader in self.loaders.flattened:
            # A mixture may have loaders that got no state.
            if hasattr(loader, "load_state_dict"):
                end_restored_pass(loader)

    def _forget_loaded(self) -> None:
        if self._loaded:
            self._loaded = []
            self._is_continued = True

    def _note_states(self) -> None:
        may_change = self._loaders_have_state or self._data_has_state
        if may_change and not self.is_read_within_step:
            # Only what has a state is asked for it: to look for loaders that have one takes time.
            of_loaders = self._states_of_loaders() if self._loaders_have_state else []
            of_data = self.datamodule.state_dict() if self._data_has_state else None  # type: ignore[union-attr]
            # Pickled, because a loader may change a state that it has given.
            self._states.append(pickle.dumps((of_loaders, of_data)))

    def _drop_newest(self) -> None:
        if self._states:
            self._states.pop()

    def _read_trained_batches(self) -> None:
        """Read the batches of before the interruption, where none can be skipped."""
        num = self.resume.take_num_to_read()
        for number in range(num):
            # Seeded as before the interruption, so that a stream draws the same numbers.
            self.resume.begin_batch()
            try:
                next(self.loaders)
            except StopIteration:
                raise RunError(
                    f"the training data end after {number} batches of this epoch, but the run was "
                    f"interrupted after {num}. They have changed: continue with those it began with"
                ) from None


class StepFetcher(_PrefetchDataFetcher):
    """Gives the batches of an epoch; between two of them all ranks continue, save or stop."""

    loop: "FitLoop"

    def setup(self, combined_loader: CombinedLoader) -> None:
        """Read the loaders by the loop's ``TrainingData``."""
        super().setup(self.loop.training_data)

    def __iter__(self) -> "StepFetcher":
        # Without a length Lightning reads one batch here, where no signal could end the wait.
        _DataFetcher.__iter__(self)
        return self

    def num_trained_batches(self) -> int:
        """As ``FitLoop.num_trained_batches``."""
        num: int = self.loop.epoch_loop.batch_progress.current.ready
        return num

    def __next__(self) -> Any:
        return self.loop.read_and_agree(self._read)

    def _read(self) -> Any:
        # Lightning knows the last batch of a stream because one more is read ahead.
        is_first = self.length is None and not self.batches and not self.done
        if is_first:
            self.batches.append(_DataFetcher.__next__(self))
        return super().__next__()


class StepIteratorFetcher(_DataLoaderIterDataFetcher):
    """For a ``training_step`` that reads its batches itself; the ranks agree before it does."""

    loop: "FitLoop"

    def setup(self, combined_loader: CombinedLoader) -> None:
        """Read the loaders by the loop's ``TrainingData``."""
        # All batches that a step has read are trained on when the ranks agree again.
        self.loop.training_data.is_read_within_step = True
        super().setup(self.loop.training_data)

    def num_trained_batches(self) -> int:
        """As ``FitLoop.num_trained_batches``."""
        # Lightning counts steps, which may have read several each.
        return self.fetched

    def __next__(self) -> Any:
        return self.loop.read_and_agree(super().__next__)


class FitLoop(_FitLoop):
    """Lightning's loop over the epochs, which saves and stops where a step or an epoch is whole.

    Args:
        trainer: of the run.
        min_epochs: as in Lightning.
        max_epochs: as in Lightning.
    """

    def __init__(self, trainer: L.Trainer, min_epochs: int | None, max_epochs: int | None) -> None:
        self._fetcher: Any = None
        super().__init__(trainer, min_epochs, max_epochs)
        self.training_data: Any = None
        """A ``TrainingData``, from the moment at which Lightning has the loaders."""
        self.checkpoints = find_callback(trainer, Checkpoints)
        self.seeds = find_callback(trainer, SeedSteps)
        (self.resume,) = callbacks_of(trainer, DataResume)
        (self.objects,) = callbacks_of(trainer, Objects)
        self.plugins = callbacks_of(trainer, Plugin)
        self.sliced = SlicedStep(trainer)
        # Most have not this hook, and steps may be short.
        self._show_to_plugins = [
            each.on_batch_read
            for each in self.plugins
            if type(each).on_batch_read is not Plugin.on_batch_read
        ]
        self._last_step = -math.inf  # when it began
        self._first_length: Any = None
        self._rehearsal: tuple[stopping.Stopped, list[L.Callback]] | None = None

    @property
    def _data_fetcher(self) -> Any:
        return self._fetcher

    @_data_fetcher.setter
    def _data_fetcher(self, fetcher: Any) -> None:
        # Lightning chooses a fetcher in the middle of `setup_data`, and makes its iterator at once.
        if isinstance(fetcher, _DataLoaderIterDataFetcher):
            fetcher = StepIteratorFetcher()
        elif isinstance(fetcher, _PrefetchDataFetcher):
            fetcher = StepFetcher(fetcher.prefetch_batches)
        if fetcher is not None:
            fetcher.loop = self
        self._fetcher = fetcher

    def setup_data(self) -> None:
        """Take the training loaders."""
        lightning: Any = fit_loop
        lightning.sized_len = self._length_of
        try:
            super().setup_data()
        finally:
            lightning.sized_len = sized_len

    def _length_of(self, loaders: Any) -> int | None:
        """The batches of an epoch, which Lightning counts once, when training begins.

        A run that continues has them as they were then: training may have changed the data since.
        """
        return sized_len(loaders) if self._first_length is None else self._first_length

    def _load_combined_loader_states(self) -> None:
        """Let the data begin where they were; Lightning makes their iterator next.

        The loops need not be restored by then: ``trainer.estimated_stepping_batches`` in
        ``configure_optimizers`` makes the iterator too.
        """
        trainer: Any = self.trainer
        assert self._combined_loader is not None
        self.training_data = TrainingData(
            self._combined_loader, trainer.datamodule, self.resume, self.objects
        )
        states, epoch_is_over = self.resume.take_loader_states()
        self.training_data.load_states(states, epoch_is_over=epoch_is_over)
        self.resume.begin(trainer)
        loaders = self._combined_loader.flattened
        lengths = [*map(sized_len, loaders)]
        self.objects.place_data(trainer)
        self._first_length = None
        if len(loaders) == 1 and [*map(sized_len, loaders)] != lengths:
            (limit,) = self._combined_loader.limits or [math.inf]
            self._first_length = min(lengths[0] or math.inf, limit)

    def num_trained_batches(self) -> int:
        """Batches of this epoch that the steps before the next one have read."""
        num: int = self._fetcher.num_trained_batches()
        return num

    def reset(self) -> None:
        """Begin to train; a run that continues does so as an undisturbed one would.

        A checkpoint is saved where a step or an epoch is whole, so nothing must be repeated.
        Lightning would repeat the end of an epoch whenever ``max_steps`` is set, and step no
        plateau schedule at the end of an epoch that was continued.
        """
        super().reset()
        if not self.restarted_mid_epoch:
            self.epoch_loop.restarting = False
        # Not by its setter, which says that a run with max_steps always restarts.
        self._restarting = False

    def on_run_start(self) -> None:
        """Defer signals from here on; restore metrics and objects after every hook's own."""
        stopping.defer()
        virtual.begin_stage(self.trainer.lightning_module, self.epoch_loop)
        super().on_run_start()
        if self.restarted_mid_epoch:
            # Lightning calls `on_train_epoch_start` of no callback then, in which this bar learns
            # the number of the epoch and its length.
            for bar in callbacks_of(self.trainer, TQDMProgressBar):
                bar.on_train_epoch_start(self.trainer)
        virtual.begin_stage(self.trainer.lightning_module, self.epoch_loop)
        self.objects.begin(self.trainer)
        for ranks in callbacks_of(self.trainer, RankState):
            ranks.begin(self.trainer, self.trainer.lightning_module)

    def read_and_agree(self, read: Callable[[], Any]) -> Any:
        """Read the next batch; then all ranks continue, save, or save and stop.

        Raises:
            Stopped: on every rank, after saving, if one of them got a signal.
        """
        trainer, progress = self.trainer, self.epoch_loop.batch_progress.current
        # Within an optimizer step there is nothing to save: its gradients would be lost.
        is_between_steps = progress.ready % trainer.accumulate_grad_batches == 0
        if not is_between_steps:
            batch = self._wait_for_batch(read)
            slices = slices_of(batch)
        else:
            try:
                batch = stopping.interruptible(partial(self._wait_for_batch, read))
                slices = slices_of(batch)
                self.resume.take_batch(trainer, slices, self.objects.suspects)
            except stopping.Stopped:
                # The other ranks agree before this step, and wait for this rank's answer.
                self._agree()
                raise
            try:
                self._agree()
            except stopping.Stopped as stopped:
                self._rehearse(stopped)
            self.resume.forget_batch()
        self._last_step = time.monotonic()
        self.training_data.step_begins()
        if self.seeds is not None:
            # Before the batch is moved: hooks of the transfer may draw random numbers.
            self.seeds.seed_step(trainer, progress.ready)
        if slices:
            first, *self.sliced.others = slices
            batch = first, *batch[1:]
            self.sliced.is_repeated = False
        for show in self._show_to_plugins:
            show(trainer, progress.ready, slices[0] if slices else None)
        virtual.begin_step()
        return batch

    def _wait_for_batch(self, read: Callable[[], Any]) -> Any:
        phases.switch(phases.DATA)
        try:
            return read()
        finally:
            phases.switch(phases.TRAINING)

    def _rehearse(self, stopped: stopping.Stopped) -> None:
        """Let the next step be computed before this process ends, for nothing but its receipt.

        The next start begins with this step, and compares it: what training depends on and is in
        no checkpoint shows. The run is saved by now, and no hook of after the step is called.

        Raises:
            Stopped: if a step takes long, or if somebody waits at a terminal.
        """
        trainer = self.trainer
        is_plain = (
            trainer.lightning_module.automatic_optimization
            and trainer.accumulate_grad_batches == 1
            and not self.training_data.is_read_within_step
            and getattr(trainer.precision_plugin, "scaler", None) is None
        )
        step_s = time.monotonic() - self._last_step
        is_short = max(process_group.gather(step_s)) < MAX_REHEARSED_S
        if not is_plain or not is_short or stopped.name == "SIGINT":
            raise stopped
        # Nothing is written: callbacks of the user see the step when it is taken.
        callbacks = callbacks_of(trainer, L.Callback)
        self._rehearsal = stopped, callbacks
        self.epoch_loop.call_only([callback for callback in callbacks if is_ours(callback)])
        for optimizer in trainer.optimizers:
            rehearsed: Any = optimizer
            rehearsed.step = partial(self._step_and_stop, optimizer.step)

    def _step_and_stop(self, step: Callable[..., Any], closure: Callable[[], Any]) -> None:
        # The whole step, because the optimizer decides how often it asks for the loss.
        step(closure)
        for each in self.plugins:
            each.on_step_rehearsed(self.trainer)
        self.end_rehearsal()

    def end_rehearsal(self) -> None:
        """End the process if its last step is computed, or has failed, which changes nothing."""
        if self._rehearsal is not None:
            stopped, callbacks = self._rehearsal
            self.epoch_loop.call_only(callbacks)
            raise stopped from None

    def _agree(self) -> None:
        if self.checkpoints is None:
            stopping.check()
        else:
            self.checkpoints.before_step(self.trainer)

    def run(self) -> None:
        """Train all epochs; what follows, also after a signal or an error, counts as stopping."""
        try:
            super().run()
        finally:
            phases.switch(phases.STOPPING)

    def on_advance_end(self) -> None:
        """End the epoch, then save it: hooks, schedules, logs and counters are through."""
        super().on_advance_end()
        if virtual.layout().is_virtual:
            share_buffers(self.trainer.lightning_module)
        virtual.begin_stage(self.trainer.lightning_module, self.epoch_loop)
        if self.checkpoints is not None:
            self.checkpoints.end_epoch(self.trainer)

    def on_run_end(self) -> None:
        """Complete the last checkpoint, and let the hooks of the end find it."""
        if self.checkpoints is not None:
            self.checkpoints.end_run(self.trainer)
        super().on_run_end()

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Add the states of the loaders as of the next step, not of what was read ahead."""
        state: dict[str, Any] = super().on_save_checkpoint()
        if "combined_loader" in state:
            state["combined_loader"], _ = self.training_data.states_before_step()
        return state


def slices_of(fetched: Any) -> list[Any]:
    """The batches of a step that were read; none where the step reads them from an iterator."""
    if not isinstance(fetched, tuple):
        return []
    batch = fetched[0]
    return batch if isinstance(batch, Slices) else [batch]


class SlicedStep:
    """With ``virtual_ranks``: computes the slices of a process one after the other.

    Lightning takes the step: it has the batch of the first slice, counts, and calls each hook once,
    but for those around a batch and its backward pass, which see every slice.

    Args:
        trainer: of the run.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer
        # Of every run with virtual ranks.
        self.weighting: Any = find_callback(trainer, SliceWeighting)
        self.others: list[Any] = []
        """The batches of the other slices, as they were read."""
        self.is_repeated = False
        """Whether the optimizer has asked for the gradient of this step before."""
        self.loss: Any = None
        """The mean of all slices, by their samples, on every rank; None if no slice has a loss."""
        self._trees: dict[virtual.Layout, virtual.GradientTree] = {}

    def compute(
        self, first: Callable[[], Result], train: Callable[[Any], Any], *, adds: bool
    ) -> Result:
        """Give the parameters the gradients of the whole batch.

        Args:
            first: trains on the first slice; what it returns is returned.
            train: trains on the batch of another one.
            adds: whether the gradients of batches before are added.
        """
        trainer, layout = self.trainer, virtual.layout()
        parameters = [*trainer.lightning_module.parameters()]
        is_first = layout not in self._trees
        if is_first:
            check_parameters(parameters)
            self._trees[layout] = virtual.GradientTree(layout)
        tree = self._trees[layout]
        loss = torch.zeros(
            (), dtype=torch.promote_types(parameters[0].dtype, torch.float32),
            device=parameters[0].device, requires_grad=True,
        )  # fmt: skip
        before: virtual.Gradients = [None] * len(parameters)
        if adds:
            # The memory of a sum is that of the next one.
            before = virtual.copy_of(take_gradients(parameters))
        for number, batch in zip(layout.own, [None, *self.others], strict=True):
            # Every operation goes through it, so only in the first step.
            rejects = is_first and layout.has_several
            with (
                virtual.slice_of_step(number),
                virtual.NoCollectives() if rejects else nullcontext(),  # type: ignore[no-untyped-call]
            ):
                # The first slice was seeded before its batch was moved.
                if batch is not None or self.is_repeated:
                    self._seed()
                if number == layout.own[0]:
                    result = first()
                else:
                    train(batch)
            own = self.weighting.take_loss()
            own = own if own is None else own.to(loss).reshape(())
            gradients = take_gradients(parameters)
            if is_first:
                check_gradients(gradients)
            # Their losses are added up beside their gradients, by the same exchange.
            tree.add(number, [*gradients, own])
        self.is_repeated = True
        *gradients, total = tree.total([*parameters, loss])
        self.loss = virtual.copy_of(total)
        sums = virtual.add(before, gradients)
        for parameter, gradient in zip(parameters, sums, strict=True):
            parameter.grad = gradient
        virtual.end_step()
        return result

    def has_samples(self) -> bool:
        """Whether the current slice has any: a short batch has too few for all slices."""
        return bool(self.weighting.weight())

    def _seed(self) -> None:
        """Seed the random numbers of the current slice."""
        loop: Any = self.trainer.fit_loop
        if loop.seeds is not None:
            loop.seeds.seed_step(self.trainer, loop.epoch_loop.batch_idx)


class Optimization(_AutomaticOptimization):
    """Lightning's step, with all slices of a process in it."""

    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        closure: Any = super()._make_closure(kwargs, optimizer, batch_idx)
        if not virtual.layout().is_virtual:
            return closure
        sliced: SlicedStep = self.trainer.fit_loop.sliced  # type: ignore[attr-defined]
        train = partial(self._train_on, kwargs, optimizer, batch_idx)
        adds = closure._zero_grad_fn is None
        first = partial(self._compute, closure, closure.closure)

        def compute_all() -> ClosureResult:
            result = sliced.compute(first, train, adds=adds)
            # An optimizer may decide by it, such as L-BFGS: on all ranks alike.
            result.loss = sliced.loss
            return result

        closure.closure = compute_all
        return closure

    def _compute(self, closure: Any, compute: Callable[[], ClosureResult]) -> ClosureResult:
        """The loss of a slice and its gradient, which is 0 without a sample."""
        sliced: SlicedStep = self.trainer.fit_loop.sliced  # type: ignore[attr-defined]
        if sliced.has_samples():
            return compute()
        if closure._zero_grad_fn is not None:
            closure._zero_grad_fn()
        return ClosureResult(torch.zeros((), device=self.trainer.strategy.root_device))

    def _train_on(self, kwargs: Any, optimizer: Any, batch_idx: int, batch: Any) -> None:
        trainer = self.trainer
        batch = move(trainer, batch)
        results: Any = trainer._results
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None
        call._call_callback_hooks(trainer, "on_train_batch_start", batch, batch_idx)
        call._call_lightning_module_hook(trainer, "on_train_batch_start", batch, batch_idx)
        closure = super()._make_closure({**kwargs, "batch": batch}, optimizer, batch_idx)  # type: ignore[arg-type]
        closure._zero_grad_fn = None
        self._compute(closure, closure.closure)


def check_parameters(parameters: list[Any]) -> None:
    """Raise a ConfigError for an optimizer within the backward pass: it would see a slice only."""
    if any(parameter._post_accumulate_grad_hooks for parameter in parameters):
        raise ConfigError(
            f"{setting('virtual_ranks', virtual.layout().total)}: a parameter has a hook that acts "
            "when its gradient is complete, and there it is that of a slice only; leave out the "
            "hook, or virtual_ranks"
        )


def check_gradients(gradients: virtual.Gradients) -> None:
    """Raise a ConfigError for a sparse gradient, which has no place of its own in an exchange."""
    if any(each is not None and each.is_sparse for each in gradients):
        raise ConfigError(
            f"{setting('virtual_ranks', virtual.layout().total)}: a gradient is sparse, and slices "
            "are added up densely; use sparse=False, or leave out virtual_ranks"
        )


def take_gradients(parameters: list[Any]) -> virtual.Gradients:
    """The gradients, which the parameters have no longer."""
    taken = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return taken


def move(trainer: Any, batch: Any, dataloader_idx: int = 0) -> Any:
    """Move a batch to the device, as Lightning does, through the hooks of the transfer."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
    return call._call_strategy_hook(
        trainer, "batch_to_device", batch, dataloader_idx=dataloader_idx
    )


class EpochLoop(_TrainingEpochLoop):
    """Trains on the batches of one epoch; ``trainer.fit_loop.epoch_loop`` is one."""

    def __init__(self, trainer: L.Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self.automatic_optimization = Optimization(trainer)

    def reset(self) -> None:
        """Begin an epoch, or continue within one as an undisturbed run would."""
        super().reset()
        # Lightning would skip the training of one turn where a validation is due.
        self.restarting = False

    def on_run_start(self, data_fetcher: Any) -> None:
        """Begin with the batch that comes next."""
        super().on_run_start(data_fetcher)
        # Lightning takes one batch per step for granted.
        data_fetcher.fetched = self.trainer.fit_loop.resume.batch

    def advance(self, data_fetcher: Any) -> None:
        """Train on one batch."""
        try:
            self.train_on_next(data_fetcher)
        except Exception:
            loop: Any = self.trainer.fit_loop
            loop.end_rehearsal()
            raise

    def train_on_next(self, data_fetcher: Any) -> None:
        """Train as Lightning does; a plug-in may have a shorter way."""
        super().advance(data_fetcher)

    def _broadcast_sigterm_tensor(self) -> None:
        """No-op: ``FitLoop.read_and_agree`` replaces Lightning's broadcast in each step."""

    def call_only(self, callbacks: list[L.Callback]) -> None:
        """Let these callbacks be all that there are."""
        trainer: Any = self.trainer
        trainer.callbacks = callbacks


def is_ours(callback: L.Callback) -> bool:
    """Whether a callback belongs to every run."""
    return type(callback).__module__.startswith("samestep.")


def find_callback(trainer: L.Trainer, kind: type[Kind]) -> Kind | None:
    """The callback of this kind; None if there is none, as in a run that keeps no checkpoints."""
    return next(iter(callbacks_of(trainer, kind)), None)


class EvaluationLoop(_EvaluationLoop):
    """Lightning's validation, of each slice of a batch by itself."""

    def on_run_start(self) -> None:
        """Let each slice count for itself."""
        virtual.begin_stage(self.trainer.lightning_module, self)
        super().on_run_start()

    def _on_evaluation_epoch_start(self, *args: Any, **kwargs: Any) -> None:
        super()._on_evaluation_epoch_start(*args, **kwargs)
        # A callback may have put an average of the model in its place, and puts it back below.
        self._share_buffers()

    def _on_evaluation_epoch_end(self) -> None:
        super()._on_evaluation_epoch_end()
        self._share_buffers()

    def _share_buffers(self) -> None:
        if virtual.layout().is_virtual:
            share_buffers(self.trainer.lightning_module)

    def _evaluation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any
    ) -> None:
        layout = virtual.layout()
        if not layout.is_virtual:
            super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
            return
        loaders: Any = self._combined_loader
        order = order_of_loader(loaders.flattened[dataloader_idx])
        virtual.begin_step()
        for number in layout.own:
            is_first = number == layout.own[0]
            # Lightning reads one item of the loader for a batch, and that is our first slice.
            of_slice = batch if is_first else self._read_slice()
            if order is not None and not order.lengths(batch_idx)[number]:
                continue
            with virtual.slice_of_step(number):
                self._seed(batch_idx, dataloader_idx)
                if is_first:
                    super()._evaluation_step(of_slice, batch_idx, dataloader_idx, dataloader_iter)
                else:
                    self._evaluate_other(of_slice, batch_idx, dataloader_idx)
        virtual.end_step()

    def _read_slice(self) -> Any:
        """The next item of the loader, or of all loaders where each batch has one of each."""
        iterator: Any = self._combined_loader._iterator  # type: ignore[union-attr]
        return next(iterator.iterators[0]) if self._is_sequential else next(iterator)[0]

    def _seed(self, batch_idx: int, dataloader_idx: int) -> None:
        """Seed a slice before it is moved: hooks of the transfer may draw random numbers."""
        trainer: Any = self.trainer
        for seeds in callbacks_of(trainer, SeedSteps):
            seeds.on_validation_batch_start(
                trainer, trainer.lightning_module, None, batch_idx, dataloader_idx
            )

    def _evaluate_other(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        """Evaluate another slice of the batch, which counts as one."""
        trainer: Any = self.trainer
        stage = "test" if trainer.testing else "validation"
        number = dataloader_idx if self._is_sequential and self.num_dataloaders > 1 else None
        batch = move(trainer, batch, dataloader_idx)
        arguments = self._build_kwargs(batch, batch_idx, number)
        results = trainer._results
        results.batch, results.batch_size, results.dataloader_idx = batch, None, number
        for call_hook in (call._call_callback_hooks, call._call_lightning_module_hook):
            call_hook(trainer, f"on_{stage}_batch_start", *arguments.values())
        of_step = self._build_step_args_from_hook_kwargs(arguments, f"{stage}_step")
        output = call._call_strategy_hook(trainer, f"{stage}_step", *of_step)
        for call_hook in (call._call_callback_hooks, call._call_lightning_module_hook):
            call_hook(trainer, f"on_{stage}_batch_end", output, *arguments.values())
        results.batch = results.batch_size = None


class TestLoop(EvaluationLoop):
    """Lightning's test, which all ranks end together at a signal; the next attempt tests again."""

    __test__ = False  # no test of pytest

    @property
    def _data_fetcher(self) -> Any:
        return self._fetcher

    @_data_fetcher.setter
    def _data_fetcher(self, fetcher: Any) -> None:
        can_wait = fetcher is not None and not isinstance(fetcher, _DataLoaderIterDataFetcher)
        self._fetcher = TestFetcher(fetcher) if can_wait else fetcher

    def on_run_start(self) -> None:
        """Defer signals: from here on the ranks ask each other before each batch.

        Before, while the checkpoint is loaded, a signal ends this process at once.
        """
        stopping.defer()
        super().on_run_start()


class TestFetcher:
    """Gives the batches of a test; between two of them all ranks continue or stop.

    A job of Slurm that gets SIGUSR1 is requeued here too, as by Lightning.
    """

    __test__ = False

    def __init__(self, fetcher: _DataFetcher) -> None:
        self.fetcher = fetcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fetcher, name)

    def __next__(self) -> Any:
        try:
            batch = stopping.interruptible(self.fetcher.__next__)
        except stopping.Stopped:
            stopping.check()
            raise
        agreed = stopping.agreed()
        # There is nothing to save: the run has its last checkpoint.
        if agreed.requeue and on_rank_zero(stopping.requeue):
            raise stopping.Stopped(agreed.signum or signal.SIGUSR1)
        if agreed.signum:
            raise stopping.Stopped(agreed.signum)
        return batch


def end_restored_pass(loader: Any) -> None:
    """Let a loader begin its next epoch at the beginning, after one that resumed from a state.

    litdata 0.2 forgets the state only when it is read to the end. Lightning counts the batches and
    stops at the last one, so the next epoch would begin in the middle too. A stream of ``datasets``
    5.2 never forgets it: as long as its ``set_epoch`` is not called, each later epoch begins where
    the state says.
    """
    if getattr(loader, "restore", False) is True:
        loader.restore = False
    dataset: Any = getattr(loader, "dataset", None)
    if not hasattr(dataset, "_starting_state_dict"):
        return
    # An empty state restores nothing, and neither do these calls in an epoch of another number.
    dataset.load_state_dict({})
    # Loader processes that outlive the epoch have a data set with the state; new ones have not.
    if getattr(loader, "persistent_workers", False):
        loader.load_state_dict({})
