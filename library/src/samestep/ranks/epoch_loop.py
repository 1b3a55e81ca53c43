"""The loop over the batches of an epoch: Lightning's, without what nobody asked for.

In each step Lightning 2.6 calls six hooks of every callback, most of which are empty, looks up
which hooks the module has and what arguments they take, and makes two texts per hook for a
profiler. ``EpochLoop`` finds all this out once per epoch, and then calls the hooks that exist, with
the same arguments, in the same order and with the same counters. An MNIST-format epoch takes 1.34
times as long without it (docs/performance.md).

An ordinary step has one optimizer, no accumulated gradients, 32 bits and no profiler, and the
module leaves the step to Lightning. Any other step is Lightning's own. A canary in
library/tests/ranks/test_epoch_loop.py holds the text of what is left out.
"""

import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

Hook = Callable[..., Any]

HOOKS = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end",
)  # fmt: skip
TRANSFERS = "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"
"""The hooks of a module or DataModule that may change a batch."""
STEP = "optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping"
"""Methods of a module that make up a step."""


class EpochLoop(_TrainingEpochLoop):
    """Trains on the batches of one epoch; ``trainer.fit_loop.epoch_loop`` is one."""

    state_of_data: bytes | None = None
    """The ``state_dict`` of the DataModule before the next batch, pickled, which takes less time
    than a copy; None between two batches."""
    num_steps_before: int | None = None
    """Steps that Lightning has counted, if the run continues within this epoch."""

    def reset(self) -> None:
        """Begin an epoch, or go on within one as an undisturbed run would."""
        super().reset()
        if self.num_steps_before is not None:
            # Lightning keeps the counters of an epoch as long as it calls itself restarting. It
            # counts a step once more, because its own checkpoints are saved before that.
            self._batches_that_stepped, self.num_steps_before = self.num_steps_before, None
            self.restarting = False

    def on_run_start(self, data_fetcher: Any) -> None:
        """Find out what a step of this epoch consists of."""
        super().on_run_start(data_fetcher)
        trainer, module = self.trainer, self.trainer.lightning_module
        strategy: Any = trainer.strategy
        self._is_ordinary = (
            module.automatic_optimization
            and type(trainer.profiler) is PassThroughProfiler
            and type(trainer.precision_plugin) is Precision
            and not isinstance(data_fetcher, _DataLoaderIterDataFetcher)
            and all(is_of(module, name, L.LightningModule) for name in STEP)
            and all(is_of(strategy, name, Strategy) for name in ("backward", "batch_to_device"))
            and is_of(strategy, "optimizer_step", Strategy, DDPStrategy)
            and getattr(strategy, "_model_averager", None) is None
            and not strategy.handles_gradient_accumulation
            and not self.automatic_optimization._skip_backward
        )
        self._data_has_state = trainer.datamodule is not None and not is_of(
            trainer.datamodule, "state_dict", L.LightningDataModule
        )
        self._hooks = {name: self._find_hooks(name) for name in HOOKS}
        # `self.log` asks there, by `_current_fx_name`, in which hook it is.
        self._attributes = module.__dict__
        self._num_callbacks = len(trainer.callbacks)
        self._transfers = self._find_transfers()
        step = module.training_step
        is_plain = is_of(strategy, "training_step", Strategy) and strategy.model is module
        self._training_step = step if is_plain else strategy.training_step
        self._num_arguments = 1 + is_param_in_hook_signature(step, "batch_idx", min_args=2)
        self._validates_at_end = (
            trainer.val_check_batch == trainer.num_training_batches < math.inf
            and trainer.check_val_every_n_epoch is not None
            and trainer._val_check_time_interval is None
        )
        self._has_plateau = any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)

    def advance(self, data_fetcher: Any) -> None:
        """Train on one batch."""
        trainer = self.trainer
        # A DataModule may count the batches that it reads or moves to the device, before
        # `on_train_batch_start`, where the ranks agree to stop or save.
        if self._data_has_state:
            self.state_of_data = pickle.dumps(trainer.datamodule.state_dict())
        is_ordinary = (
            self._is_ordinary
            and not self._restarting
            and trainer.accumulate_grad_batches == 1
            and len(trainer.callbacks) == self._num_callbacks
        )
        try:
            self._train_on_next(data_fetcher) if is_ordinary else super().advance(data_fetcher)
        except StopIteration:  # the epoch is over
            self.state_of_data = None
            raise
        # Not after any other error: a signal may have ended the wait for the batch.
        self.state_of_data = None

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Validate, if it is time for it."""
        has_more = (
            self.trainer.should_stop or self._has_plateau or self.batch_progress.is_last_batch
        )
        if has_more or not self._validates_at_end:
            super().on_advance_end(data_fetcher)
        else:
            self._batches_that_stepped += not self._should_accumulate()

    def _broadcast_sigterm_tensor(self) -> None:
        """Ask nobody: all ranks stop together in samestep.ranks.stopping."""

    def _find_hooks(self, name: str) -> tuple[list[Hook], Hook | None]:
        """The hooks of this name that do anything: those of the callbacks, and the module's."""
        trainer, module = self.trainer, self.trainer.lightning_module
        of_callbacks: list[Hook] = [
            partial(getattr(callback, name), trainer, module)
            for callback in trainer.callbacks
            if callable(getattr(callback, name)) and not is_of(callback, name, L.Callback)
        ]
        hook = getattr(module, name)
        return of_callbacks, None if is_of(module, name, L.LightningModule) else hook

    def _find_transfers(self) -> list[tuple[str, Hook]]:
        """The hooks through which a batch goes on its way to the device."""
        selector = self.trainer._data_connector._datahook_selector
        owners = [(name, selector.get_instance(name)) for name in TRANSFERS]
        return [
            (name, getattr(owner, name))
            for name, owner in owners
            if name == "transfer_batch_to_device"
            or not is_of(owner, name, L.LightningModule, L.LightningDataModule)
        ]

    def _call(self, name: str, *args: Any) -> Any:
        """Call the hooks of this name; returns what the module's does."""
        of_callbacks, of_module = self._hooks[name]
        if not of_callbacks and of_module is None:
            return None
        attributes = self._attributes
        before, attributes["_current_fx_name"] = attributes["_current_fx_name"], name
        for hook in of_callbacks:
            hook(*args)
        response = of_module(*args) if of_module else None
        attributes["_current_fx_name"] = before
        return response

    def _train_on_next(self, data_fetcher: Any) -> None:
        """Do what Lightning's ``advance`` does for an ordinary step."""
        trainer, progress = self.trainer, self.batch_progress
        if self.val_loop.restarting:
            self.val_loop.restarting = False
        batch, _, _ = next(data_fetcher)
        batch_idx = self.batch_idx + 1
        progress.is_last_batch = data_fetcher.done

        batch = trainer.precision_plugin.convert_input(batch)
        attributes = self._attributes
        for name, transfer in self._transfers:
            attributes["_current_fx_name"] = name
            is_move = name == "transfer_batch_to_device"
            where = (trainer.strategy.root_device, 0) if is_move else (0,)
            batch = transfer(batch, *where)
        attributes["_current_fx_name"] = None
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
        if is_epoch_over:
            raise StopIteration

        self._call("on_train_batch_end", outputs, batch, batch_idx)
        if results:
            metrics = results.metrics(True)
            logs._progress_bar_metrics.update(metrics["pbar"])
            logs._callback_metrics.update(metrics["callback"])
            logs._logged_metrics.update(metrics["log"])
        results.batch = results.batch_size = None
        progress.increment_completed()
        every = trainer.log_every_n_steps
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
        if type(output) is Tensor:
            return output, {"loss": output.detach().clone()}
        if output is None and self.trainer.world_size > 1:
            raise RuntimeError(
                "training_step returned None, which one of several ranks cannot do alone; return "
                "a loss of zero, such as 0.0 * loss"
            )
        result = self.automatic_optimization.output_result_cls.from_training_step_output(output)
        return result.closure_loss, {} if result.loss is None else result.asdict()


def is_of(owner: object, name: str, *kinds: type) -> bool:
    """Whether this method of an object is the one of a class, and no other."""
    function = getattr(getattr(owner, name), "__func__", None)
    return any(function is getattr(kind, name, None) for kind in kinds)


def install(trainer: L.Trainer) -> None:
    """Let the Trainer run its epochs by an ``EpochLoop``."""
    loop = trainer.fit_loop.epoch_loop
    trainer.fit_loop.epoch_loop = EpochLoop(trainer, loop.min_steps, loop.max_steps)
