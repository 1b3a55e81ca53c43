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

``EpochLoop`` also has a shorter way through an ordinary step. Lightning 2.6 calls six hooks of
every callback in each step, most of which are empty, looks up which hooks the module has and what
arguments they take, and makes two texts per hook for a profiler. ``EpochLoop`` finds all this out
once per epoch, and then calls the hooks that exist, with the same arguments, in the same order and
with the same counters. An MNIST-format epoch takes 1.34 times as long without it
(labs/bench/results.md). Where Lightning's step is not the one that is written down here
(``STEP_DIGEST``), every step is Lightning's own.
"""

import copy
import hashlib
import inspect
import logging
import math
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable
from functools import cache, partial
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
from lightning.pytorch.loops.optimization import automatic
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from samestep.callbacks.checkpoints import Checkpoints
from samestep.callbacks.data_resume import DataResume
from samestep.callbacks.objects import Objects
from samestep.callbacks.rank_state import RankState
from samestep.callbacks.rng import SeedSteps, seed_hook
from samestep.data.loaders import without_states
from samestep.errors import RunError
from samestep.plugin import Plugin
from samestep.ranks import compat, epoch_logs, process_group, stopping
from samestep.ranks.compat import before_hooks, callbacks_of
from samestep.ranks.process_group import on_rank_zero
from samestep.ranks.requeue import requeue_job
from samestep.run import wall_time

log = logging.getLogger(__name__)

Hook = Callable[..., Any]
Kind = TypeVar("Kind")

HOOKS = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end",
)  # fmt: skip
TRANSFERS = "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"
"""The hooks of a module or DataModule that may change a batch."""
STEP = "optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping"
"""Methods of a module that make up a step."""
MAX_REHEARSED_S = 5.0  # of the last step, where the next one is computed before a process ends
STEP_DIGEST = "d227d8baea1f687a5b44e4d16e0ad8d625da2c7aef14bfbcb53bea1f266f66fc"
"""SHA-256 of the source of Lightning's step, of which ``EpochLoop`` has a shorter form."""


def install(trainer: L.Trainer) -> None:
    """Let ``trainer`` train and test by the loops of this module, with its callbacks of ours."""
    epoch_logs.install()
    before_hooks(seed_hook)
    old: Any = trainer.fit_loop
    loop = FitLoop(trainer, old.min_epochs, old.max_epochs)
    loop.epoch_loop = EpochLoop(trainer, old.epoch_loop.min_steps, old.epoch_loop.max_steps)
    validate = loop.epoch_loop.val_loop.run
    loop.epoch_loop.val_loop.run = wall_time.spend(wall_time.VALIDATION)(validate)  # type: ignore[method-assign]
    trainer.fit_loop = loop
    trainer.test_loop = TestLoop(
        trainer,
        TrainerFn.TESTING,
        RunningStage.TESTING,
        inference_mode=trainer.test_loop.inference_mode,
    )


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
        self._data_has_state = datamodule is not None and not is_of(
            datamodule, "state_dict", L.LightningDataModule
        )
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
        compat.number_batches(self.loaders, self.resume.num_skipped)
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
        return self._watch(self._read_next, is_first_batch=True)

    def _read_next(self) -> Any:
        self._read_trained_batches()
        self._begin_batch()
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
            self._begin_batch()
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
                compat.end_restored_pass(loader)

    def _forget_loaded(self) -> None:
        if self._loaded:
            self._loaded = []
            self._is_continued = True

    def _begin_batch(self) -> None:
        self.resume.begin_batch()
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
            self._begin_batch()
            self._drop_newest()
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
        super().on_run_start()
        if self.restarted_mid_epoch:
            # Lightning calls `on_train_epoch_start` of no callback then, in which this bar learns
            # the number of the epoch and its length.
            for bar in callbacks_of(self.trainer, TQDMProgressBar):
                bar.on_train_epoch_start(self.trainer)
        self.clock = wall_time.current()
        for ranks in callbacks_of(self.trainer, RankState):
            ranks.begin(self.trainer, self.trainer.lightning_module)
        self.objects.begin(self.trainer)

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
        else:
            try:
                batch = stopping.interruptible(partial(self._wait_for_batch, read))
                self.resume.take_batch(trainer, batch, self.objects.suspects)
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
        if self.plugins:
            self._show_to_plugins(batch)
        return batch

    def _show_to_plugins(self, fetched: Any) -> None:
        # An iterator is read by the step.
        batch = fetched[0] if isinstance(fetched, tuple) else None
        for plugin in self.plugins:
            plugin.on_batch_read(self.trainer, self.epoch_loop.batch_progress.current.ready, batch)

    def _wait_for_batch(self, read: Callable[[], Any]) -> Any:
        next_cause = self.clock.wait_for_batch()
        try:
            return read()
        finally:
            self.clock.take_batch(next_cause)

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
        callbacks = compat.callbacks_of(trainer, L.Callback)
        self._rehearsal = stopped, callbacks
        self.epoch_loop.call_only([callback for callback in callbacks if is_ours(callback)])
        for optimizer in trainer.optimizers:
            rehearsed: Any = optimizer
            rehearsed.step = partial(self._step_and_stop, optimizer.step)

    def _step_and_stop(self, step: Callable[..., Any], closure: Callable[[], Any]) -> None:
        # The whole step, because the optimizer decides how often it asks for the loss.
        step(closure)
        for plugin in self.plugins:
            plugin.on_step_rehearsed(self.trainer)
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
            wall_time.current().switch(wall_time.STOPPING)

    def on_advance_end(self) -> None:
        """End the epoch, then save it: hooks, schedules, logs and counters are through."""
        super().on_advance_end()
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


class EpochLoop(_TrainingEpochLoop):
    """Trains on the batches of one epoch; ``trainer.fit_loop.epoch_loop`` is one.

    An ordinary step has one optimizer, no accumulated gradients, 32 bits or bf16-mixed and no
    profiler, and the module leaves the step to Lightning. Any other step is Lightning's own.
    """

    def reset(self) -> None:
        """Begin an epoch, or continue within one as an undisturbed run would."""
        super().reset()
        # Lightning would skip the training of one turn where a validation is due.
        self.restarting = False

    def on_run_start(self, data_fetcher: Any) -> None:
        """Find out what a step of this epoch consists of."""
        super().on_run_start(data_fetcher)
        # Lightning takes one batch per step for granted.
        data_fetcher.fetched = self.trainer.fit_loop.resume.batch
        trainer, module = self.trainer, self.trainer.lightning_module
        strategy: Any = trainer.strategy
        self._clock = wall_time.current()
        self._is_ordinary = self._leaves_step_to_lightning(data_fetcher)
        self._hooks = {name: self._find_hooks(name) for name in HOOKS}
        # `self.log` asks there, by `_current_fx_name`, in which hook it is.
        self._attributes = module.__dict__
        self._num_callbacks = len(trainer.callbacks)
        self._transfers = self._find_transfers()
        step = module.training_step
        # A strategy such as DDP calls its own wrapper of the module, in the context of a precision.
        has_context = type(trainer.precision_plugin) is not Precision
        is_of_lightning = is_of(strategy, "training_step", Strategy)
        is_plain = is_of_lightning and strategy.model is module and not has_context
        self._training_step = step if is_plain else strategy.training_step
        self._num_arguments = 1 + is_param_in_hook_signature(step, "batch_idx", min_args=2)
        self._validates_at_end = (
            trainer.val_check_batch == trainer.num_training_batches < math.inf
            and trainer.check_val_every_n_epoch is not None
            and getattr(trainer, "_val_check_time_interval", None) is None  # since Lightning 2.6
        )
        self._has_plateau = any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)

    def _leaves_step_to_lightning(self, data_fetcher: Any) -> bool:
        """Whether each step of this epoch is the one of which this class has a short form."""
        trainer, module = self.trainer, self.trainer.lightning_module
        if not knows_lightnings_step() or not module.automatic_optimization:
            return False
        if type(trainer.profiler) is not PassThroughProfiler:
            return False
        if not has_plain_precision(trainer.precision_plugin):
            return False
        if isinstance(data_fetcher, _DataLoaderIterDataFetcher):
            return False
        if not all(is_of(module, name, L.LightningModule) for name in STEP):
            return False
        return has_plain_step(trainer.strategy) and not self.automatic_optimization._skip_backward

    def advance(self, data_fetcher: Any) -> None:
        """Train on one batch."""
        try:
            self._advance(data_fetcher)
        except Exception:
            loop: Any = self.trainer.fit_loop
            loop.end_rehearsal()
            raise

    def _advance(self, data_fetcher: Any) -> None:
        # A callback may be added, or the accumulation changed, within an epoch.
        is_ordinary = (
            self._is_ordinary
            and self.trainer.accumulate_grad_batches == 1
            and len(self.trainer.callbacks) == self._num_callbacks
        )
        if is_ordinary:
            self._train_on_next(data_fetcher)
        else:
            super().advance(data_fetcher)

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Count the step, and validate, if it is time for it."""
        self._clock.count_step(self.trainer.global_step)
        is_last = self.trainer.should_stop or self.batch_progress.is_last_batch
        if is_last or self._has_plateau or not self._validates_at_end:
            super().on_advance_end(data_fetcher)
        elif not self._should_accumulate():
            # What Lightning does after a batch where no validation can be due.
            self._batches_that_stepped += 1

    def _broadcast_sigterm_tensor(self) -> None:
        """No-op: ``FitLoop.read_and_agree`` replaces Lightning's broadcast in each step."""

    def _find_hooks(self, name: str) -> tuple[list[Hook], Hook | None]:
        """The hooks of this name that do anything: those of the callbacks, and the module's."""
        trainer, module = self.trainer, self.trainer.lightning_module
        of_callbacks: list[Hook] = []
        for callback in trainer.callbacks:
            hook = getattr(callback, name)
            if callable(hook) and not is_of(callback, name, L.Callback):
                of_callbacks.append(partial(hook, trainer, module))
        if is_of(module, name, L.LightningModule):
            return of_callbacks, None
        return of_callbacks, getattr(module, name)

    def _find_transfers(self) -> list[tuple[str, Hook]]:
        """The hooks through which a batch goes on its way to the device."""
        # A hook of the DataModule wins over that of the module.
        selector = self.trainer._data_connector._datahook_selector
        transfers: list[tuple[str, Hook]] = []
        for name in TRANSFERS:
            owner = selector.get_instance(name)
            is_empty = is_of(owner, name, L.LightningModule, L.LightningDataModule)
            # The empty form of this one moves the batch.
            if name == "transfer_batch_to_device" or not is_empty:
                transfers.append((name, getattr(owner, name)))
        return transfers

    def call_only(self, callbacks: list[L.Callback]) -> None:
        """Let these callbacks be all that there are."""
        trainer: Any = self.trainer
        trainer.callbacks = callbacks
        self._hooks = {name: self._find_hooks(name) for name in HOOKS}

    def _call(self, name: str, *args: Any) -> Any:
        """Call the hooks of this name; returns what the module's does."""
        of_callbacks, of_module = self._hooks[name]
        if not of_callbacks and of_module is None:
            return None
        attributes = self._attributes
        # `self.log` asks there in which hook it was called.
        before, attributes["_current_fx_name"] = attributes["_current_fx_name"], name
        for hook in of_callbacks:
            hook(*args)
        response = of_module(*args) if of_module else None
        attributes["_current_fx_name"] = before
        return response

    def _train_on_next(self, data_fetcher: Any) -> None:
        """Do what Lightning's ``advance`` does for an ordinary step."""
        trainer, progress = self.trainer, self.batch_progress
        batch, _, _ = next(data_fetcher)
        batch_idx = self.batch_idx + 1
        progress.is_last_batch = data_fetcher.done

        batch = self._move(trainer.precision_plugin.convert_input(batch))
        progress.increment_ready()
        logs, results = trainer._logger_connector, self._results
        logs._first_loop_iter = logs._first_loop_iter is None
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None

        outputs: Any = None
        is_epoch_over = False
        if batch is None:
            self._warning_cache.warn("train_dataloader yielded None, which is no batch.")
        else:
            is_epoch_over = self._call("on_train_batch_start", batch, batch_idx) == -1
            trainer.strategy.on_train_batch_start(batch, batch_idx)
            if is_epoch_over:
                progress.increment_by(0, is_last_batch=True)
            else:
                progress.increment_started()
                outputs = self._step((batch, batch_idx)[: self._num_arguments])
        progress.increment_processed()

        if trainer.lr_scheduler_configs:
            self._step_schedules()
            if self._num_ready_batches_reached():
                self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        # The schedules are stepped first: the epoch ends as a whole one does.
        if is_epoch_over:
            raise StopIteration

        self._call("on_train_batch_end", outputs, batch, batch_idx)
        self._update_logs()

    def _move(self, batch: Any) -> Any:
        """Move a batch to the device, through the hooks of the transfer."""
        attributes = self._attributes
        for name, transfer in self._transfers:
            attributes["_current_fx_name"] = name
            if name == "transfer_batch_to_device":
                batch = transfer(batch, self.trainer.strategy.root_device, 0)
            else:
                batch = transfer(batch, 0)
        attributes["_current_fx_name"] = None
        return batch

    def _update_logs(self) -> None:
        """Count the batch, and hand on what was logged."""
        trainer, logs, results = self.trainer, self.trainer._logger_connector, self._results
        if results:
            metrics = results.metrics(True)
            logs._progress_bar_metrics.update(metrics["pbar"])
            logs._callback_metrics.update(metrics["callback"])
            logs._logged_metrics.update(metrics["log"])
        results.batch = results.batch_size = None
        self.batch_progress.increment_completed()
        every = trainer.log_every_n_steps
        # `+ 1`: Lightning counts the step when its batch is through.
        is_due = every and (self._batches_that_stepped + 1) % every == 0
        if is_due or trainer.should_stop or trainer.fast_dev_run:
            logs.update_train_step_metrics()

    def _step_schedules(self) -> None:
        """Step the schedules that go by steps and not by a metric."""
        module: Any = self.trainer.lightning_module
        attributes = self._attributes
        for config in self.trainer.lr_scheduler_configs:
            is_due = config.interval == "step" and (self.batch_idx + 1) % config.frequency == 0
            if is_due and not config.reduce_on_plateau:
                self.scheduler_progress.increment_ready()
                attributes["_current_fx_name"] = "lr_scheduler_step"
                module.lr_scheduler_step(config.scheduler, None)
                attributes["_current_fx_name"] = None
                self.scheduler_progress.increment_completed()

    def _step(self, args: tuple[Any, ...]) -> dict[str, Any]:
        """Take an optimizer step; returns what ``training_step`` did, for the callbacks."""
        trainer, strategy = self.trainer, self.trainer.strategy
        optimizer, progress = trainer.optimizers[0], self.automatic_optimization.optim_progress
        counts = progress.optimizer
        attributes = self._attributes
        outputs: dict[str, Any] | None = None

        # A closure, because the optimizer decides when the gradient is needed: L-BFGS calls it
        # several times in a step.
        def closure() -> Any:
            nonlocal outputs
            with torch.enable_grad():
                attributes["_current_fx_name"] = "training_step"
                output = self._training_step(*args)
                loss, outputs = self._read(output)

                attributes["_current_fx_name"] = "optimizer_step"
                counts.zero_grad.increment_ready()
                self._call("on_before_zero_grad", optimizer)
                counts.zero_grad.increment_started()
                optimizer.zero_grad()
                counts.zero_grad.increment_completed()

                if loss is not None:
                    attributes["_current_fx_name"] = "backward"
                    strategy.pre_backward(loss)
                    self._call("on_before_backward", loss)
                    loss.backward()  # type: ignore[no-untyped-call]
                    self._call("on_after_backward")
                    strategy.post_backward(loss.detach())
                    attributes["_current_fx_name"] = "optimizer_step"
            self._call("on_before_optimizer_step", optimizer)
            if trainer.gradient_clip_val is not None:
                trainer.lightning_module.configure_gradient_clipping(
                    optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
                )
            return outputs.get("loss")

        counts.step.increment_ready()
        attributes["_current_fx_name"] = "optimizer_step"
        optimizer.step(closure=closure)
        attributes["_current_fx_name"] = None
        counts.step.increment_completed()
        if outputs is None:
            name = type(optimizer).__name__
            raise RuntimeError(f"{name}.step() has not called its closure, which trains the model")
        return outputs

    def _read(self, output: Any) -> tuple[Tensor | None, dict[str, Any]]:
        """The loss that ``training_step`` has returned, and what callbacks get of its output."""
        # A copy: a module may change its loss in place after the step.
        if type(output) is Tensor:
            return output, {"loss": output.detach().clone()}
        if output is None and self.trainer.world_size > 1:
            raise RuntimeError(
                "training_step returned None, which one of several ranks cannot do alone; return "
                "a loss of zero, such as 0.0 * loss"
            )
        result = self.automatic_optimization.output_result_cls.from_training_step_output(output)
        return result.closure_loss, {} if result.loss is None else result.asdict()


def is_ours(callback: L.Callback) -> bool:
    """Whether a callback belongs to every run."""
    return type(callback).__module__.startswith("samestep.")


def find_callback(trainer: L.Trainer, kind: type[Kind]) -> Kind | None:
    """The callback of this kind; None if there is none, as in a run that keeps no checkpoints."""
    return next(iter(callbacks_of(trainer, kind)), None)


def is_of(owner: object, name: str, *kinds: type) -> bool:
    """Whether this method of an object is the one of a class, and no other."""
    function = getattr(getattr(owner, name), "__func__", None)
    return any(function is getattr(kind, name, None) for kind in kinds)


def has_plain_precision(plugin: Any) -> bool:
    """Whether a precision changes no more of a step than the context of ``training_step``."""
    if type(plugin) is MixedPrecision:
        # With 16-mixed it scales the loss, and may skip the step.
        return plugin.scaler is None
    return type(plugin) is Precision


def has_plain_step(strategy: Any) -> bool:
    """Whether a strategy leaves a step to Lightning: backward pass, optimizer and accumulation."""
    for name in ("backward", "batch_to_device"):
        if not is_of(strategy, name, Strategy):
            return False
    averages_models = getattr(strategy, "_model_averager", None) is not None
    if averages_models or strategy.handles_gradient_accumulation:
        return False
    return is_of(strategy, "optimizer_step", Strategy, DDPStrategy)


@cache
def knows_lightnings_step() -> bool:
    """Whether ``EpochLoop`` has the short form of the installed Lightning's step.

    It is only faster, so another version trains by its own step.
    """
    parts = (
        _TrainingEpochLoop.advance, _TrainingEpochLoop.on_advance_end,
        _TrainingEpochLoop._should_check_val_fx, _TrainingEpochLoop._update_learning_rates,
        automatic, Precision, MixedPrecision, Strategy.backward, Strategy.optimizer_step,
        Strategy.batch_to_device, Strategy.training_step,
    )  # fmt: skip
    try:
        text = "".join(inspect.getsource(part) for part in parts)
    except OSError:  # installed without its source
        text = ""
    is_known = hashlib.sha256(text.encode()).hexdigest() == STEP_DIGEST
    if not is_known:
        log.warning(
            "Lightning %s takes its steps in another way than the version that is known; they go "
            "through Lightning's own loop, which costs some 0.1 ms per step", L.__version__,
        )  # fmt: skip
    return is_known


class TestLoop(_EvaluationLoop):
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
        if agreed.requeue and on_rank_zero(requeue_job):
            raise stopping.Stopped(agreed.signum or signal.SIGUSR1)
        if agreed.signum:
            raise stopping.Stopped(agreed.signum)
        return batch
