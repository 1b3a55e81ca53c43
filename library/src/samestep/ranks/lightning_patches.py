"""The private names of other libraries that we use, with the version and the reason.

``samestep.loops`` has those of Lightning's loops.

Each has a canary test in library/tests/ranks/test_lightning_patches.py, which fails when the
library has changed; pyproject.toml bounds the versions from above.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from samestep.ranks import environment

if TYPE_CHECKING:
    import lightning as L  # takes seconds to import, and the agent needs none of it
    from torchmetrics import Metric


Kind = TypeVar("Kind")


def callbacks_of(trainer: "L.Trainer", kind: type[Kind]) -> list[Kind]:
    """The callbacks of one kind; the types of Lightning 2.6 know no callbacks of a Trainer."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, kind)]


def apply(trainer: "L.Trainer") -> None:
    """Change what Lightning has no switch for, in every run."""
    leave_signals_to_us(trainer)
    search_gpus_once()
    leave_out_empty_batches()
    name_arguments_of_loaders()
    reduce_logs_over_ranks()
    wrap_again_when_unfrozen(trainer)


def leave_signals_to_us(trainer: "L.Trainer") -> None:
    """Keep Lightning 2.6 from handling SIGTERM.

    Its handler talks to the other ranks in the middle of a step, and hangs there. There is no
    public switch. Our way is samestep.ranks.stopping; ``EpochLoop`` leaves out the broadcast in
    each step. Upstream: Lightning-AI/pytorch-lightning issues 20806 and 21487.
    """
    ours: Any = trainer
    ours._signal_connector.register_signal_handlers = lambda: None


def search_gpus_once() -> None:
    """Keep torch 2.15 from searching for GPUs before each step, where there are none.

    Adam and AdamW ask in each step whether there is a GPU. Lightning 2.6 sets a variable with which
    torch loads the library of the driver to answer, so that CUDA is not started before processes
    are forked. Without a GPU no CUDA can be started. An MNIST-format epoch takes 1.13 times as long
    without this (docs/performance.md). Upstream: pytorch/pytorch pull request 85951.
    """
    import torch

    if not torch.cuda.is_available():
        environment.unset_variables(["PYTORCH_NVML_BASED_CUDA_CHECK"])


@cache  # once in a process, which may have several runs
def reduce_logs_over_ranks() -> None:
    """Let Lightning 2.6 reduce over the ranks what is logged without ``sync_dist``, once per epoch.

    Otherwise each rank has the value of its own samples, and rank zero records and monitors that of
    its share. Setting ``sync_dist`` instead would hang if only some ranks log a metric, and would
    reduce in each step too. It happens at the end of an epoch's batches, and again after the hook
    of the module in which more may be logged, before callbacks read the values.
    """
    from lightning.pytorch.trainer import call
    from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import (
        _LoggerConnector,
    )

    kind: Any = _LoggerConnector
    hooks: Any = call
    end_batches, call_hook = kind.epoch_end_reached, hooks._call_lightning_module_hook

    def end_batches_and_reduce(connector: Any) -> None:
        end_batches(connector)
        if connector.trainer.training:
            add_logs_before(connector.trainer, is_end=True)
        _reduce_logs(connector)

    def call_hook_and_reduce(trainer: Any, name: str, *args: Any, **named: Any) -> Any:
        result = call_hook(trainer, name, *args, **named)
        if name in ("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end"):
            _reduce_logs(trainer._logger_connector)
        return result

    kind.epoch_end_reached = end_batches_and_reduce
    hooks._call_lightning_module_hook = call_hook_and_reduce


def _reduce_logs(connector: Any) -> None:
    """Replace the value of each metric by the one over all ranks that have logged it."""
    import torch

    from samestep.ranks import process_group

    results = connector.trainer._results
    if connector.trainer.world_size == 1 or results is None:
        return
    own = {}
    for key, metric in results.valid_items():
        meta = metric.meta
        # A torchmetrics.Metric reduces itself. Of what is logged per step, callbacks see the last
        # value of the training, and none of an evaluation.
        if metric.is_tensor and not meta.sync.should and (meta.on_epoch or results.training):
            names = results._forked_name(metric, on_step=False)
            own[key] = {"names": names, **_figures(metric)}

    # Names and values together: a metric that only some ranks log must not let them wait.
    for key, entry in _over_ranks(process_group.gather(own)).items():
        value = torch.tensor(entry["value"], dtype=torch.float64)
        if entry["reduction"] == "mean":
            value /= entry["weight"]  # nan where no rank had a sample
        metric = results[key] if key in own else None
        if metric is not None and metric.meta.on_epoch:
            metric._computed = value.to(metric.value)
        else:
            connector._callback_metrics.update(dict.fromkeys(entry["names"], value.float()))


def _figures(metric: Any) -> dict[str, Any]:
    """What a metric of Lightning 2.6 has summed up, and the samples behind a mean; otherwise 1."""
    is_mean = metric.meta.on_epoch and metric.meta.is_mean_reduction
    weight = int(metric.cumulated_batch_size) if is_mean else 1
    reduction = metric.meta.reduce_fx.__name__
    return {"value": metric.value.item(), "weight": weight, "reduction": reduction}


def _over_ranks(of_ranks: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The figures of each metric over all ranks that have logged it; a mean is a sum so far."""
    import torch

    summed_up = {}
    for key in sorted({key for logs in of_ranks for key in logs}):
        entries = [logs[key] for logs in of_ranks if key in logs]
        name = entries[0]["reduction"]
        reduce = torch.sum if name == "mean" else getattr(torch, name)
        values = torch.tensor([entry["value"] for entry in entries], dtype=torch.float64)
        weight = sum(entry["weight"] for entry in entries)
        summed_up[key] = entries[0] | {"value": reduce(values).item(), "weight": weight}
    return summed_up


def wrap_again_when_unfrozen(trainer: "L.Trainer") -> None:
    """Let DDP of torch 2.15 follow a model whose parameters are frozen or unfrozen while it trains.

    DDP sums the gradients of those parameters that needed one when it was made. Each rank would
    train a parameter that is unfrozen later by its own samples, and the ranks would end with
    different weights; for one that is frozen later, DDP waits in vain. Callbacks for fine-tuning
    do both. So the model is wrapped again before the step. Upstream:
    Lightning-AI/pytorch-lightning issue 20340.
    """
    from lightning.pytorch.strategies import DDPStrategy

    strategy: Any = trainer.strategy
    if DDPStrategy not in type(strategy).__mro__:
        return
    configure, step = strategy.configure_ddp, strategy.training_step
    parameters: list[Any] = []
    registered: list[bool] = []  # which of them have their gradients summed

    def note_and_configure() -> None:
        parameters[:] = strategy.model.parameters()
        registered[:] = [parameter.requires_grad for parameter in parameters]
        configure()

    def wrap_and_step(*args: Any, **named: Any) -> Any:
        if [parameter.requires_grad for parameter in parameters] != registered:
            strategy.model._remove_autograd_hooks()
            strategy.model = strategy.lightning_module
            # The ranks have equal weights already; their buffers differ within an epoch.
            strategy._ddp_kwargs["init_sync"] = False
            strategy.configure_ddp()
        return step(*args, **named)

    strategy.configure_ddp, strategy.training_step = note_and_configure, wrap_and_step


def logged_metrics(trainer: "L.Trainer", *, on_step: bool) -> dict[str, dict[str, Any]]:
    """What Lightning 2.6 has logged of the training: for the last batch, or so far for the epoch.

    ``log`` is for loggers, and ``pbar`` for whoever shows progress.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    metrics: dict[str, dict[str, Any]] = loop._results.metrics(on_step=on_step)
    return metrics


def num_logged_steps(trainer: "L.Trainer") -> int:
    """The steps by which Lightning 2.6 counts what it logs.

    These are optimizer steps, but with manual optimization batches: one may have no step, or two.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def logs_of_epoch(trainer: "L.Trainer") -> dict[str, dict[str, Any]]:
    """What Lightning 2.6 has summed up of each metric that the training logs for an epoch.

    Its checkpoints have nothing of it.
    """
    add_logs_before(trainer)
    loop: Any = trainer.fit_loop.epoch_loop
    flags = ("fx", "name", "prog_bar", "logger", "on_step", "enable_graph", "add_dataloader_idx")
    logs: dict[str, dict[str, Any]] = {
        key: {
            **_figures(metric),
            "flags": {name: getattr(metric.meta, name) for name in flags},
        }
        for key, metric in loop._results.items()
        if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset
    }
    before: dict[str, dict[str, Any]] = loop.__dict__.get("logs_before", {})
    return logs | before


def continue_logs(trainer: "L.Trainer", saved: list[dict[str, dict[str, Any]]]) -> None:
    """Let the metrics of this epoch continue from what ``logs_of_epoch`` gave on some ranks."""
    loop: Any = trainer.fit_loop.epoch_loop
    loop.logs_before = _over_ranks(saved)


def add_logs_before(trainer: "L.Trainer", is_end: bool = False) -> None:
    """Add what ``continue_logs`` got to the metrics that have been logged since.

    Lightning 2.6 makes a metric when it is logged first. Right after that batch, numbers are still
    added in the same order as without an interruption. At the end of the epoch the others follow.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    before = loop.__dict__.get("logs_before")
    if not before:
        return
    import torch
    from lightning.pytorch.trainer.connectors.logger_connector import result

    for key in list(before) if is_end else before.keys() & loop._results.keys():
        entry = before.pop(key)
        reduction = getattr(torch, entry["reduction"])
        if key not in loop._results:
            meta = result._Metadata(**entry["flags"], on_epoch=True, reduce_fx=reduction)
            meta.sync = result._Sync()  # perhaps not on all ranks, so ``_reduce_logs`` does it
            new = result._ResultMetric(meta, is_tensor=True).to(trainer.strategy.root_device)
            new._update_count = 1
            loop._results[key] = new
        metric = loop._results[key]
        if entry["reduction"] in ("max", "min"):
            metric.value = reduction(metric.value, metric.value.new_tensor(entry["value"]))
        else:
            metric.value = metric.value + entry["value"]
        if entry["reduction"] == "mean":
            metric.cumulated_batch_size = metric.cumulated_batch_size + entry["weight"]


def ids_of_logged_metrics(trainer: "L.Trainer") -> set[int]:
    """The metrics of torchmetrics that Lightning 2.6 resets when the epoch is over."""
    loop: Any = trainer.fit_loop.epoch_loop
    return {id(metric.value) for metric in loop._results.values() if not metric.is_tensor}


def state_of_metric(metric: "Metric") -> dict[str, Any]:
    """What a metric of torchmetrics 1.9 has counted, and in how many updates."""
    from lightning.fabric.utilities import move_data_to_device

    return {"count": metric.update_count, "states": move_data_to_device(metric.metric_state, "cpu")}


def continue_metric(metric: "Metric", saved: list[dict[str, Any]]) -> None:
    """Continue from what ``state_of_metric`` gave on some ranks.

    torchmetrics 1.9 would save the states of rank zero alone, and not the number of updates.

    Raises:
        RuntimeError: if it cannot merge the states of several ranks; then the metric is empty.
    """
    from lightning.fabric.utilities import move_data_to_device

    for state in saved:
        states = move_data_to_device(state["states"], metric.device)
        if metric._update_count == 0:
            for name, value in states.items():
                setattr(metric, name, value)
        else:
            metric.merge_state(states)
        metric._update_count += state["count"]


@cache  # once in a process, which may have several runs
def leave_out_empty_batches() -> None:
    """Keep a batch without samples out of the mean that Lightning 2.6 takes over an epoch.

    The last batch of a validation may have no sample for some rank. The mean over no samples is
    nan. Lightning multiplies it by the number of samples, and 0 times nan is nan too, so the metric
    would be nan on every rank.
    """
    import torch
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric

    update = _ResultMetric.update

    @wraps(update)
    def update_unless_empty(metric: _ResultMetric, value: Any, batch_size: int) -> None:
        if metric.is_tensor and batch_size == 0:
            value = torch.zeros_like(value)
        update(metric, value, batch_size)

    _ResultMetric.update = update_unless_empty  # type: ignore[method-assign, assignment]


@cache  # once in a process, which may have several runs
def name_arguments_of_loaders() -> None:
    """Let Lightning 2.6 make a ``DataLoader(dataset, 32, True)`` again.

    It does so to predict, and to split the data over several ranks. What was passed by position it
    passes a second time by name, and fails. Upstream: Lightning-AI/pytorch-lightning issue 17991.
    """
    from lightning.pytorch.utilities import data

    find = data._get_dataloader_init_args_and_kwargs

    @wraps(find)
    def find_by_name(loader: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        positional, named = find(loader, *args, **kwargs)
        names = getattr(loader, "__pl_saved_arg_names", ())
        if len(names) != len(positional):  # a subclass that takes *args
            return positional, named
        return (), dict(zip(names, positional, strict=True)) | named

    data._get_dataloader_init_args_and_kwargs = find_by_name  # type: ignore[assignment]


def share_out_batch_samplers(trainer: "L.Trainer", share: Callable[[Any, str], Any]) -> None:
    """Let DataLoaders get another batch sampler when Lightning takes them.

    Lightning 2.6 replaces a ``BatchSampler`` of torch by samples one at a time, without a word. It
    rejects other batch samplers, with the advice of a flag that shares nothing out. ``share`` gets
    a loader and a stage (``train``, ``validate``, ``test``, ``predict``), and returns this rank's
    batch sampler, or None for what Lightning does. Upstream:
    Lightning-AI/pytorch-lightning issue 21122.
    """
    from torch.utils.data import DataLoader

    connector = trainer._data_connector
    prepare: Callable[..., Any] = connector._prepare_dataloader

    def prepare_dataloader(dataloader: Any, shuffle: bool, mode: Any) -> Any:
        is_loader = isinstance(dataloader, DataLoader)
        batches = share(dataloader, mode.value) if is_loader else None
        if batches is None:
            return prepare(dataloader, shuffle, mode)
        # DataLoader raises where this attribute is assigned.
        vars(dataloader)["batch_sampler"] = batches
        return dataloader

    connector._prepare_dataloader = prepare_dataloader  # type: ignore[method-assign]


def repeats_shorter_loaders(trainer: "L.Trainer") -> bool:
    """Whether the shorter ones of several training loaders begin again within an epoch."""
    loaders: Any = trainer.fit_loop._combined_loader
    return len(loaders.flattened) > 1 and loaders._mode == "max_size_cycle"


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the samplers of a loader the epoch, as Lightning 2.6 does when it begins one.

    In a run that continues, loader processes ask for their first batches before that.
    """
    from lightning.fabric.utilities.data import _set_sampler_epoch

    _set_sampler_epoch(loader, epoch)


def skip_fused_step(optimizer: Optimizer, skip: Tensor) -> None:
    """Let a fused optimizer of torch 2.15 skip its next step if ``skip`` is true on the device.

    torch's GradScaler sets these attributes. Nothing else tells a fused optimizer to skip a step
    without the process having to wait for the device.
    """
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
