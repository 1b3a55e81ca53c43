"""What a run logs for an epoch: the same over all ranks, before and after an interruption.

Lightning 2.6 keeps the sums of ``self.log`` in private objects, and its checkpoints have nothing of
them. torchmetrics 1.9 saves the states of rank zero only, without the number of updates.
"""

import warnings
from collections.abc import Iterator
from functools import cache, wraps
from itertools import chain
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector import logger_connector, result
from lightning.pytorch.utilities.memory import recursive_detach
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from samestep.ranks import process_group, virtual

Entry = dict[str, Any]
"""One metric of ``self.log`` on one rank: ``flags`` (its arguments), ``states`` and ``count`` (as
those of a metric of torchmetrics), and ``last``, its value in the last step."""
Logs = dict[str, Entry]

END_HOOKS = "on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end"


class Merged(result._Metadata):
    """How a metric was logged on some ranks; how the program logs it next replaces this.

    Lightning 2.6 compares the two. On another number of ranks they differ, no checkpoint can hold a
    process group, and the program may have changed what goes into the progress bar.
    """

    def __ne__(self, given: object) -> bool:
        self.__dict__.update(given.__dict__)
        self.__class__ = result._Metadata  # type: ignore[assignment]
        return False


@cache  # once in a process, which may have several runs
def install() -> None:
    """Change how this process sums up what is logged."""
    leave_out_empty_batches()
    reduce_logs_over_ranks()
    count_slices()


def reduce_logs_over_ranks() -> None:
    """Reduce over the ranks what is logged for an epoch, once, before any callback reads it.

    Without ``sync_dist`` each rank would have the value of its own samples, and rank zero would
    record and monitor that of its slice. Setting ``sync_dist`` instead would hang if only some
    ranks log a metric, and would reduce in each step too.

    With ``sync_dist``, and for torchmetrics objects, Lightning asks the other ranks when a value is
    first read. A progress bar reads on rank zero only, while the other ranks are elsewhere.
    """
    connector_class: Any = logger_connector._LoggerConnector
    hooks: Any = call
    end_batches = connector_class.epoch_end_reached
    call_hook = hooks._call_lightning_module_hook

    def end_batches_and_reduce(connector: Any) -> None:
        end_batches(connector)
        _reduce_logs(connector)

    def call_hook_and_reduce(trainer: Any, name: str, *args: Any, **named: Any) -> Any:
        returned = call_hook(trainer, name, *args, **named)
        # The module may have logged more there, and callbacks read the values next.
        if name in END_HOOKS:
            _reduce_logs(trainer._logger_connector)
        return returned

    connector_class.epoch_end_reached = end_batches_and_reduce
    hooks._call_lightning_module_hook = call_hook_and_reduce


def _reduce_logs(connector: Any) -> None:
    """Replace the value of each metric by the one over all ranks that have logged it."""
    trainer = connector.trainer
    if not virtual.is_shared():
        return
    # All metrics are gathered together: ranks may have logged different ones, and a collective for
    # each metric would wait for ranks that have not logged it.
    results = trainer._results
    own = virtual.each(lambda: _collect_due(trainer._results, results.dataloader_idx))
    of_slices = [*chain.from_iterable(process_group.gather(own))]
    for key, merged, states in _merge(trainer.lightning_module, of_slices):
        metric = merged
        if not merged.is_tensor:
            # The object itself, which computes with all ranks: also with one that has a value.
            metric = results.get(key, merged)
            metric._computed = metric.value._computed = None
        with warnings.catch_warnings():
            # Of an object of which this rank has counted nothing.
            warnings.filterwarnings("ignore", ".*called before the ``update`` method")
            value = metric.compute()
        if merged.is_tensor:
            value = value.to(states["value"].dtype).to(trainer.lightning_module.device)
        names = results._forked_name(merged, on_step=False)
        connector._callback_metrics.update(dict.fromkeys(names, value))
        if key in own[0]:
            results[key]._computed = value


def _collect_due(results: Any, dataloader_idx: int | None) -> Logs:
    """What has been logged with the batches of a loader, and is not reduced yet."""
    own: Logs = {}
    # Lightning sets that of the first slice only.
    results.dataloader_idx = dataloader_idx
    for key, metric in results.valid_items():
        if metric.meta.sync.should and metric.meta.sync.group is not None:
            metric.compute()  # over the ranks of the group, as Lightning does
        elif _is_due(metric, results.training):
            own[key] = _entry_of(metric)
    return own


def _is_due(metric: Any, is_training: bool) -> bool:
    """Whether callbacks will read a value of it that is not yet the one of all ranks."""
    meta = metric.meta
    if not metric.is_tensor:
        return meta.on_epoch and metric._computed is None
    # Of what is logged per step, callbacks see the last value of the training, which Lightning has
    # reduced with ``sync_dist``, and none of an evaluation.
    return meta.on_epoch or (is_training and not meta.sync.should)


def _entry_of(metric: Any) -> Entry:
    """How a metric was logged, and what it has summed up, as a checkpoint may hold it."""
    meta = metric.meta
    last = metric._forward_cache if meta.on_step else None
    entry = {
        "flags": vars(meta) | {"reduce_fx": meta.reduce_fx.__name__, "_sync": meta.sync.should},
        "last": recursive_detach(last, to_cpu=True),
        **metric_state(metric),
    }
    if metric.is_tensor and not meta.on_epoch:
        # Lightning counts no samples of a last value: the ranks count the same.
        entry["states"]["cumulated_batch_size"] = torch.ones(())
    return entry


def _merge(
    module: L.LightningModule, logs_of_ranks: list[Logs]
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Each metric that some ranks have logged, with the sums of all of them, and the first's."""
    parts: dict[str, Any] = dict(module.named_modules())
    # Every rank goes through them in the same order.
    for key in sorted(set[str]().union(*logs_of_ranks)):
        entries = [logs[key] for logs in logs_of_ranks if key in logs]
        first = entries[0]
        # It computes what this rank knows: the sums of other ranks are among its own.
        sync = result._Sync(fn=None, _should=first["flags"]["_sync"])
        meta = Merged(**first["flags"] | {"_sync": sync})
        metric: Any = result._ResultMetric(meta, is_tensor="value" in first["states"])
        metric.full_state_update = False  # its states can be merged
        if not metric.is_tensor:
            metric.value = parts.get(first["flags"]["metric_attribute"])
        elif not meta.is_mean_reduction:
            metric._reductions["value"] = meta.reduce_fx
        if metric.is_tensor:
            # Three ranks that log the same value have this mean, which 32 bits would round.
            entries = [
                entry | {"states": apply_to_collection(entry["states"], Tensor, Tensor.double)}
                for entry in entries
            ]
        resume_metric(metric, entries)
        metric._forward_cache = first["last"]
        yield key, metric, first["states"]


def leave_out_empty_batches() -> None:
    """Keep a batch without samples out of the mean that Lightning 2.6 takes over an epoch.

    The last batch of a validation may have no sample for some rank. The mean over no samples is
    nan. Lightning multiplies it by the number of samples, and 0 times nan is nan too, so the metric
    would be nan on every rank.
    """
    update = result._ResultMetric.update

    @wraps(update)
    def update_unless_empty(metric: Any, value: Any, batch_size: int) -> None:
        if metric.is_tensor and batch_size == 0:
            value = torch.zeros_like(value)
        update(metric, value, batch_size)

    result._ResultMetric.update = update_unless_empty  # type: ignore[method-assign, assignment]


def count_slices() -> None:
    """With virtual ranks let metrics be those of all slices, in their order.

    What is logged per step is that of the first slice, also with ``sync_dist``: other ranks may
    have fewer slices. torchmetrics 1.9 would add up those of each rank first.
    """
    log, sync = result._ResultCollection.log, Metric._sync_dist

    @wraps(log)
    def log_of_slice(results: Any, *args: Any, **options: Any) -> None:
        if virtual.layout().is_virtual and options.get("on_step"):
            options["sync_dist"] = False
        log(results, *args, **options)

    @wraps(sync)
    def sync_slices(metric: Any, *args: Any, **options: Any) -> None:
        if not virtual.layout().is_virtual:
            sync(metric, *args, **options)
            return
        if virtual.leave_alone(metric):
            return
        of_slices = virtual.gather(lambda: metric_state(metric)["states"])
        for name, reduce in metric._reductions.items():
            values: Any = [states[name] for states in of_slices]
            if isinstance(values[0], list):
                values = [*chain.from_iterable(values)]
                values = [value.to(metric.device) for value in values]
            else:
                values = torch.stack(values).to(metric.device)
            has_values = reduce is not None and len(values)
            setattr(metric, name, reduce(values) if has_values else values)

    result._ResultCollection.log = log_of_slice  # type: ignore[method-assign]
    Metric._sync_dist = sync_slices  # type: ignore[method-assign, assignment]


def logged_metrics(trainer: L.Trainer, *, on_step: bool) -> dict[str, dict[str, Any]]:
    """What the training has logged: for the last batch, or so far for the epoch.

    ``log`` is for loggers, and ``pbar`` for a progress bar.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    metrics: dict[str, dict[str, Any]] = loop._results.metrics(on_step=on_step)
    return metrics


def num_logged_steps(trainer: L.Trainer) -> int:
    """The steps by which Lightning 2.6 counts what it logs.

    These are optimizer steps, but with manual optimization batches: one may have no step, or two.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def num_logged_steps_of(checkpoint: dict[str, Any]) -> int:
    """``num_logged_steps`` of a run that continues from this checkpoint."""
    loop: dict[str, Any] = checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]
    return int(loop["_batches_that_stepped"])


def set_logged_steps(trainer: L.Trainer, step: int) -> None:
    """Let Lightning 2.6 log what an evaluation logs as of this step: it has not trained."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def collect_logs(trainer: L.Trainer) -> Logs:
    """What the training has logged in this epoch, for a checkpoint.

    Lightning 2.6 logs the last value of a step again in a step in which the module logs nothing.
    """
    results = trainer.fit_loop.epoch_loop._results
    return {key: _entry_of(metric) for key, metric in results.valid_items()}


def resume_logs(trainer: L.Trainer, module: L.LightningModule, logs_of_ranks: list[Logs]) -> None:
    """Let the metrics of this epoch continue from what ``collect_logs`` gave on some ranks."""
    for key, metric, states in _merge(module, logs_of_ranks):
        for name, state in states.items():
            setattr(metric, name, getattr(metric, name).to(state.dtype).to(module.device))
        if metric.value is not None:  # an object that is no part of the module
            trainer.fit_loop.epoch_loop._results[key] = metric
        # Lightning resets numbers in the first batch of an epoch, and this epoch has had it.
        trainer._logger_connector._first_loop_iter = True


def logged_metric_ids(trainer: L.Trainer) -> set[int]:
    """The ids of torchmetrics objects that Lightning 2.6 resets when the epoch is over."""
    metrics = trainer.fit_loop.epoch_loop._results.values()
    return {id(metric.value) for metric in metrics if not metric.is_tensor}


def metric_state(metric: Metric) -> dict[str, Any]:
    """What a metric of torchmetrics 1.9 has counted, and in how many updates."""
    states = recursive_detach(metric.metric_state, to_cpu=True)
    return {"count": metric.update_count, "states": states}


def resume_metric(metric: Metric, saved: list[dict[str, Any]]) -> None:
    """Continue from what ``metric_state`` gave on some ranks.

    Raises:
        RuntimeError: if the metric cannot merge the states of several ranks; it is empty then.
    """
    for number, state in enumerate(saved):
        # A copy: two metrics of a collection may have one tensor, to which each would add.
        states = apply_to_collection(
            state["states"], Tensor, Tensor.to, device=metric.device, copy=True
        )
        if number == 0:
            vars(metric).update(states)
        else:
            metric.merge_state(states)
        metric._update_count += state["count"]
