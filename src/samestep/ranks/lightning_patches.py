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
        if callable(hook):
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


def uncount_step_before_validation(trainer: "L.Trainer") -> None:
    """Undo one count of a run that continues right after a validation within an epoch.

    Lightning 2.6 then skips the training of one turn of its loop, and counts a step in it that
    was counted before the checkpoint. The numbers of the steps in the history depend on it.
    """
    loop = trainer.fit_loop.epoch_loop
    fetcher = trainer.fit_loop._data_fetcher
    within_epoch = 0 < loop.batch_progress.current.ready < trainer.num_training_batches
    if loop.restarting and within_epoch and fetcher and loop._should_check_val_fx(fetcher):
        loop._batches_that_stepped -= 1


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
