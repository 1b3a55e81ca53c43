"""Every private name of another library that we use, with the version and the reason.

Each has a canary test in tests/samestep/ranks/test_lightning_patches.py, which fails when the
library has changed; pyproject.toml bounds the versions from above.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from samestep.ranks import environment

if TYPE_CHECKING:
    import lightning as L  # takes seconds to import, and the agent needs none of it
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent


STEP_HOOKS = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end",
)  # fmt: skip


def leave_signals_to_us(trainer: "L.Trainer") -> None:
    """Keep Lightning 2.6 from handling SIGTERM, and from broadcasting a flag in each step.

    Its handler talks to the other ranks in the middle of a step, and hangs there. Each step also
    waits for a broadcast of what the handler heard. There is no public switch for either. Our way
    is samestep.ranks.stopping.
    """
    trainer._signal_connector.register_signal_handlers = _do_nothing  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _do_nothing  # type: ignore[method-assign]


def search_gpus_once() -> None:
    """Keep torch 2.15 from searching for GPUs before each step, where there are none.

    Adam and AdamW ask in each step whether there is a GPU. Lightning 2.6 sets a variable with which
    torch loads the library of the driver to answer, so that CUDA is not started before processes
    are forked. That takes 0.1 ms each time. Without a GPU no CUDA can be started.
    """
    import torch

    if not torch.cuda.is_available():
        environment.unset_variables(["PYTORCH_NVML_BASED_CUDA_CHECK"])


def skip_empty_hooks(trainer: "L.Trainer") -> None:
    """Keep Lightning 2.6 from calling, in each step, the hooks that a callback does not define.

    For each callback and hook it opens a section of its profiler, also for the empty methods of the
    base class: 90 of them in a step, which takes 0.1 ms. It leaves out what cannot be called.
    """
    from lightning import Callback

    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for hook in STEP_HOOKS:
            # Not of the class: a LambdaCallback has its hooks as attributes of the object.
            method = getattr(callback, hook)
            if getattr(method, "__func__", None) is getattr(Callback, hook):
                setattr(callback, hook, None)


def call_hooks_directly() -> None:
    """Keep Lightning 2.6 from announcing each hook to its log and its profiler.

    It makes two texts for each of 22 hooks in a step, which nobody reads, and writes the name of
    the hook into an attribute of the module. torch 2.15 then looks whether the name is a parameter.
    Here the name goes where torch would put it in the end. Only a profiler still gets its texts.
    """
    from lightning.pytorch.trainer import call

    hooks = (call._call_callback_hooks, call._call_lightning_module_hook, call._call_strategy_hook)
    if hooks[0].__module__ == __name__:
        return  # another run of this process has done it
    call._call_callback_hooks = _without_texts(hooks[0], _call_callbacks)
    call._call_lightning_module_hook = _without_texts(hooks[1], _call_module)
    call._call_strategy_hook = _without_texts(hooks[2], _call_strategy)


def _without_texts(announce: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    from lightning.pytorch.profilers import PassThroughProfiler

    def call_hook(trainer: Any, name: str, *args: Any, **named: Any) -> Any:
        module = trainer.lightning_module
        if module is None or named or type(trainer.profiler) is not PassThroughProfiler:
            return announce(trainer, name, *args, **named)
        attributes = module.__dict__
        before = attributes["_current_fx_name"]
        attributes["_current_fx_name"] = name
        result = call(trainer, module, name, args)
        attributes["_current_fx_name"] = before
        return result

    return call_hook


def _call_callbacks(trainer: Any, module: "L.LightningModule", name: str, args: Any) -> None:
    for callback in trainer.callbacks:
        hook = getattr(callback, name)
        if hook is not None:
            hook(trainer, module, *args)


def _call_module(trainer: Any, module: "L.LightningModule", name: str, args: Any) -> Any:
    hook = getattr(module, name)
    return hook(*args) if callable(hook) else None


def _call_strategy(trainer: Any, module: "L.LightningModule", name: str, args: Any) -> Any:
    return getattr(trainer.strategy, name)(*args)


def look_at_hooks_once() -> None:
    """Keep Lightning 2.6 from asking in each step what does not change while a run trains.

    It reads the signature of ``training_step``, and asks three times whether a hook of the data is
    that of the module or of the DataModule.
    """
    from lightning.pytorch.loops import training_epoch_loop
    from lightning.pytorch.trainer.connectors.data_connector import _DataHookSelector
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

    look = lru_cache(is_param_in_hook_signature)

    def has_parameter(method: Callable[..., Any], *args: Any, **kw: Any) -> bool:
        # Of the function, so that no model stays in memory.
        return look(getattr(method, "__func__", method), *args, **kw)

    loop: Any = training_epoch_loop
    loop.is_param_in_hook_signature = has_parameter

    kind: Any = _DataHookSelector
    if kind.get_instance.__module__ == __name__:
        return  # another run of this process has done it
    select = kind.get_instance

    def get_instance(selector: Any, name: str) -> Any:
        known = selector.__dict__.setdefault("known", {})
        if name not in known:
            known[name] = select(selector, name)
        return known[name]

    kind.get_instance = get_instance


def leave_out_empty_batches() -> None:
    """Keep a batch without samples out of the mean that Lightning 2.6 takes over an epoch.

    The last batch of a validation may have no sample for some rank. The mean over no samples is
    nan. Lightning multiplies it by the number of samples, and 0 times nan is nan too, so the metric
    would be nan on every rank.
    """
    import torch
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric

    update = _ResultMetric.update
    if hasattr(update, "__wrapped__"):
        return  # another run of this process has done it

    @wraps(update)
    def update_unless_empty(metric: _ResultMetric, value: Any, batch_size: int) -> None:
        if metric.is_tensor and batch_size == 0:
            value = torch.zeros_like(value)
        update(metric, value, batch_size)

    _ResultMetric.update = update_unless_empty  # type: ignore[method-assign, assignment]


@contextmanager
def between_steps(trainer: "L.Trainer") -> Iterator[None]:
    """Within this block a checkpoint says that the last step is complete, and no next one begun.

    Lightning 2.6 counts a batch as ready, and knows whether it is the last one of the epoch,
    before it calls ``on_train_batch_start``. A checkpoint saved there would make Lightning count
    the step before once more, or end the epoch without its last step.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    begun = progress.current.ready - progress.current.completed
    is_last_batch = progress.is_last_batch
    progress.current.ready -= begun
    progress.total.ready -= begun
    if begun:
        progress.is_last_batch = False
    try:
        yield
    finally:
        progress.current.ready += begun
        progress.total.ready += begun
        progress.is_last_batch = is_last_batch


def continue_as_undisturbed(trainer: "L.Trainer") -> None:
    """Put the loop of a run that continues where the loop of an undisturbed run would be.

    A checkpoint is saved between two steps, or at the end of an epoch, and holds all counters.
    Still Lightning 2.6 repeats or leaves out something while its loops call themselves restarting:

    - With ``trainer.max_steps`` it runs the end of the epoch again. One more step is part of the
      epoch, and the metrics are empty the second time.
    - It steps no plateau schedule at the end of an epoch that was continued.
    - Where a validation would be due it skips the training of one turn, but counts a step and
      steps the plateau schedules. Before the first batch of an epoch this is always so.
    - It counts ``trainer.reload_dataloaders_every_n_epochs`` from the epoch that continues.

    Call it when training starts, before anything asks for the epoch.
    """
    loop, epochs = trainer.fit_loop, trainer.fit_loop.epoch_progress
    if not loop.is_resuming:
        return
    is_within_epoch = epochs.current.started > epochs.current.processed  # type: ignore[attr-defined]
    if epochs.current.completed < epochs.current.processed:  # type: ignore[attr-defined]
        epochs.increment_completed()
    if not is_within_epoch:
        loop.reset_restart_stage()
    # Not by its setter, which says that a run with max_steps always restarts.
    loop._restarting = False
    _begin_between_steps(loop.epoch_loop, is_within_epoch)
    if every := trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
        # The data of the next epoch are loaded when it begins, if they are due then.
        epoch = trainer.current_epoch if is_within_epoch else trainer.current_epoch - 1
        loop._last_train_dl_reload_epoch = epoch - epoch % every
        loop.epoch_loop.val_loop._last_val_dl_reload_epoch = epoch - epoch % every


def _begin_between_steps(loop: Any, is_within_epoch: bool) -> None:
    if not is_within_epoch:
        loop.restarting = False  # also of the loops in it
        return
    reset = loop.reset

    def reset_once() -> None:
        del loop.reset
        num_steps = loop._batches_that_stepped
        # Keeps the counters of the epoch, as long as the loop calls itself restarting.
        reset()
        loop._batches_that_stepped = num_steps
        loop.restarting = False

    loop.reset = reset_once


def step_plateau_schedules(trainer: "L.Trainer") -> None:
    """Step the plateau schedules of an epoch that ends now.

    Lightning 2.6 does so after ``on_train_epoch_end``, where the checkpoint of the epoch is saved.
    A run that is killed then would lose the step.
    """
    loop = trainer.fit_loop
    if loop.epoch_loop._num_ready_batches_reached():
        loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    # Lightning steps none in an epoch that was restarted, and forgets that when the epoch is over.
    loop._restarting = True


def skip_fused_step(optimizer: Optimizer, skip: Tensor) -> None:
    """Let a fused optimizer of torch 2.15 skip its next step if ``skip`` is true on the device.

    torch's GradScaler sets these attributes. Nothing else tells a fused optimizer to skip a step
    without the process having to wait for the device.
    """
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = skip.float()  # type: ignore[attr-defined]


def look_while_monitoring(
    agent: "LocalElasticAgent", look: "Callable[[WorkerGroup], None]"
) -> None:
    """Let torchrun's agent of torch 2.15 call ``look`` each time before it looks at its ranks.

    It has no public hook for this.
    """
    monitor: Callable[[WorkerGroup], RunResult] = agent._monitor_workers

    def look_and_monitor(worker_group: "WorkerGroup") -> "RunResult":
        look(worker_group)
        return monitor(worker_group)

    agent._monitor_workers = look_and_monitor


def _do_nothing() -> None:
    pass
