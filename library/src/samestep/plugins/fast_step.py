"""A shorter way through an ordinary step, for steps of a millisecond. It only buys speed.

Lightning 2.6 calls six hooks of every callback in each step, most of which are empty, looks up
which hooks the module has and what arguments they take, and makes two texts per hook for a
profiler. ``FastEpochLoop`` finds all this out once per epoch, and then calls the hooks that exist,
with the same arguments, in the same order and with the same counters. An MNIST-format epoch takes
1.34 times as long without it (labs/bench/results.md). Where Lightning's step is not the one that is
written down here (``STEP_DIGEST``), every step is Lightning's own.
"""

import hashlib
import inspect
import logging
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.optimization import automatic
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from samestep.loops import EpochLoop
from samestep.ranks import virtual

log = logging.getLogger(__name__)

Hook = Callable[..., Any]

HOOKS = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end",
)  # fmt: skip
TRANSFERS = "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"
"""The hooks of a module or DataModule that may change a batch."""
STEP = "optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping"
"""Methods of a module that make up a step."""
STEP_DIGEST = "d227d8baea1f687a5b44e4d16e0ad8d625da2c7aef14bfbcb53bea1f266f66fc"
"""SHA-256 of the source of Lightning's step, of which ``FastEpochLoop`` has a shorter form."""


def epoch_loop(kind: type[EpochLoop]) -> type[EpochLoop]:
    """``FastEpochLoop``, if it knows the step of the installed Lightning."""
    return FastEpochLoop if knows_lightnings_step() else kind


class FastEpochLoop(EpochLoop):
    """Trains on the batches of one epoch.

    An ordinary step has one optimizer, no accumulated gradients, 32 bits or bf16-mixed and no
    profiler, and the module leaves the step to Lightning. Any other step is Lightning's own.
    """

    def on_run_start(self, data_fetcher: Any) -> None:
        """Find out what a step of this epoch consists of."""
        super().on_run_start(data_fetcher)
        trainer, module = self.trainer, self.trainer.lightning_module
        strategy: Any = trainer.strategy
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
        self._is_virtual = virtual.layout().is_virtual
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
        if not module.automatic_optimization:
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

    def train_on_next(self, data_fetcher: Any) -> None:
        """Train on one batch, the short way if that is possible."""
        # A callback may be added, or the accumulation changed, within an epoch.
        is_ordinary = (
            self._is_ordinary
            and self.trainer.accumulate_grad_batches == 1
            and len(self.trainer.callbacks) == self._num_callbacks
        )
        if is_ordinary:
            self._take_short_way(data_fetcher)
        else:
            super().train_on_next(data_fetcher)

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Validate, if it is time for it."""
        is_last = self.trainer.should_stop or self.batch_progress.is_last_batch
        if is_last or self._has_plateau or not self._validates_at_end:
            super().on_advance_end(data_fetcher)
        elif not self._should_accumulate():
            # What Lightning does after a batch where no validation can be due.
            self._batches_that_stepped += 1

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
        super().call_only(callbacks)
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

    def _take_short_way(self, data_fetcher: Any) -> None:
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
                outputs = self._step(batch, batch_idx)
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

    def _step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Take an optimizer step; returns what ``training_step`` did, for the callbacks."""
        trainer = self.trainer
        optimizer, progress = trainer.optimizers[0], self.automatic_optimization.optim_progress
        counts = progress.optimizer
        attributes = self._attributes
        outputs: dict[str, Any] | None = None
        compute = partial(self._compute, batch, batch_idx, optimizer)
        sliced: Any = trainer.fit_loop.sliced
        if self._is_virtual:
            train = partial(self._compute_other, batch_idx)
            compute = partial(sliced.compute, compute, train, adds=False)

        # A closure, because the optimizer decides when the gradient is needed: L-BFGS calls it
        # several times in a step.
        def closure() -> Any:
            nonlocal outputs
            with torch.enable_grad():
                outputs = compute()
            if self._is_virtual and sliced.loss is not None:
                outputs |= {"loss": sliced.loss}
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

    def _compute(self, batch: Any, batch_idx: int, optimizer: Any) -> dict[str, Any]:
        """The gradient of a slice; with an optimizer those of the step before go."""
        strategy, attributes = self.trainer.strategy, self._attributes
        loss: Tensor | None = None
        outputs: dict[str, Any] = {"loss": torch.zeros((), device=strategy.root_device)}
        if not self._is_virtual or self.trainer.fit_loop.sliced.has_samples():
            attributes["_current_fx_name"] = "training_step"
            output = self._training_step(*(batch, batch_idx)[: self._num_arguments])
            loss, outputs = self._read(output)
        attributes["_current_fx_name"] = "optimizer_step"
        if optimizer is not None:
            counts = self.automatic_optimization.optim_progress.optimizer
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
        return outputs

    def _compute_other(self, batch_idx: int, batch: Any) -> None:
        """The gradient of another slice than the first one of this process."""
        batch = self._move(self.trainer.precision_plugin.convert_input(batch))
        results = self._results
        results.batch, results.batch_size, results.dataloader_idx = batch, None, None
        self._call("on_train_batch_start", batch, batch_idx)
        self._compute(batch, batch_idx, None)

    def _read(self, output: Any) -> tuple[Tensor | None, dict[str, Any]]:
        """The loss that ``training_step`` has returned, and what callbacks get of its output."""
        # A copy: a module may change its loss in place after the step.
        if type(output) is Tensor:
            return output, {"loss": output.detach().clone()}
        if output is None and self.trainer.world_size > 1 and not self._is_virtual:
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
    """Whether ``FastEpochLoop`` has the short form of the installed Lightning's step.

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
