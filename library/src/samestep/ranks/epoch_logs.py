"""What a run logs for an epoch: the same over all ranks, before and after an interruption.

Lightning 2.6 keeps the sums of ``self.log`` in private objects, and its checkpoints have nothing of
them. torchmetrics 1.9 saves the states of rank zero only, without the number of updates.
"""

import re
import warnings
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from samestep.ranks import process_group

if TYPE_CHECKING:
    import lightning as L  # takes seconds to import
    from torchmetrics import Metric

Entry = dict[str, Any]
"""The sum of one metric: ``value``, ``weight`` (samples behind a mean, otherwise 1) and
``reduction`` (``mean``, ``sum``, ``max`` or ``min``)."""
Logs = dict[str, Entry]
Object = dict[str, Any]
"""A metric that only all ranks together can compute: its ``names``, the ``attribute`` of the module
that holds it, and ``is_due`` if it has no value yet."""

FLAGS = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph",
    "add_dataloader_idx", "metric_attribute",
)  # fmt: skip
"""Arguments of ``self.log`` with which a metric is made again."""
OF_OBJECT: Entry = {"value": 0.0, "weight": 0, "reduction": "sum"}
"""Stands for the sum of a torchmetrics object, which has states of its own."""
MEAN_HOOK = "epoch_mean"
"""Stands for the hook in which ``log_epoch_means`` logs."""
OF_TRAINING = re.compile(r"train[/_].+|.+[/_]train|(.+[/_])?loss(_step)?")
"""What describes the training among the metrics that it logs: ``train/score``, or any loss."""
END_HOOKS = "on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end"


def install() -> None:
    """Change how this process sums up what is logged."""
    leave_out_empty_batches()
    reduce_logs_over_ranks()
    add_without_checks()


@cache  # once in a process, which may have several runs
def reduce_logs_over_ranks() -> None:
    """Reduce over the ranks what is logged for an epoch, once, before any callback reads it.

    Without ``sync_dist`` each rank would have the value of its own samples, and rank zero would
    record and monitor that of its slice. Setting ``sync_dist`` instead would hang if only some
    ranks log a metric, and would reduce in each step too.

    With ``sync_dist``, and for torchmetrics objects, Lightning asks the other ranks when a value is
    first read. A progress bar reads on rank zero only, while the other ranks are elsewhere.
    """
    from lightning.pytorch.trainer import call
    from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import (
        _LoggerConnector,
    )

    connector_class: Any = _LoggerConnector
    hooks: Any = call
    end_batches = connector_class.epoch_end_reached
    call_hook = hooks._call_lightning_module_hook

    def end_batches_and_reduce(connector: Any) -> None:
        end_batches(connector)
        _reduce_logs(connector)

    def call_hook_and_reduce(trainer: Any, name: str, *args: Any, **named: Any) -> Any:
        result = call_hook(trainer, name, *args, **named)
        # The module may have logged more there, and callbacks read the values next.
        if name in END_HOOKS:
            _reduce_logs(trainer._logger_connector)
        return result

    connector_class.epoch_end_reached = end_batches_and_reduce
    hooks._call_lightning_module_hook = call_hook_and_reduce


def _reduce_logs(connector: Any) -> None:
    """Replace the value of each metric by the one over all ranks that have logged it."""
    import torch

    if connector.trainer.world_size == 1:
        return
    results = connector.trainer._results
    own = _own_logs(results)
    # Names and values are gathered together: ranks may have logged different metrics, and a
    # collective for each metric would wait for ranks that have not logged it.
    of_ranks = process_group.gather((own, _own_objects(results)))
    logs_of_ranks: list[Logs] = []
    objects: dict[str, Object] = {}
    for logs, own_objects in of_ranks:
        logs_of_ranks.append(logs)
        objects |= {key: found for key, found in own_objects.items() if found["is_due"]}
    # Every rank goes through them in the same order.
    for key in sorted(objects):
        _compute_together(connector, key, objects[key])
    for key, entry in _sum_up(logs_of_ranks).items():
        value = torch.tensor(entry["value"], dtype=torch.float64)
        if entry["reduction"] == "mean":
            value /= entry["weight"]  # nan where no rank had a sample
        if key in own and results[key].meta.on_epoch:
            results[key]._computed = value.to(results[key].value)
        else:
            connector._callback_metrics.update(dict.fromkeys(entry["names"], value.float()))


def _own_logs(results: Any) -> Logs:
    """What this rank has logged and Lightning has not reduced, with the names in callbacks."""
    own: Logs = {}
    for key, metric in results.valid_items():
        sync = metric.meta.sync
        # Of what is logged per step Lightning has reduced the value that it keeps.
        is_reduced = sync.should and (sync.rank_zero_only or not metric.meta.on_epoch)
        # Of what is logged per step, callbacks see the last value of the training, and none of an
        # evaluation.
        is_read = metric.meta.on_epoch or results.training
        if is_read and not is_reduced and not _reduces_itself(metric):
            names = results._forked_name(metric, on_step=False)
            own[key] = {"names": names, **_entry_of(metric)}
    return own


def _reduces_itself(metric: Any) -> bool:
    """Whether it has a way of its own: a torchmetrics object, or a group of some ranks."""
    is_of_group = metric.meta.sync.should and metric.meta.sync.group is not None
    return not metric.is_tensor or is_of_group


def _own_objects(results: Any) -> dict[str, Object]:
    """What this rank has logged for the epoch that only all ranks together can compute."""
    objects: dict[str, Object] = {}
    for key, metric in results.valid_items():
        if not metric.meta.on_epoch or not _reduces_itself(metric):
            continue
        is_due = metric._computed is None
        # An object that was updated after it was computed has forgotten its value.
        if not metric.is_tensor and metric.value._computed is None:
            is_due = True
        names = results._forked_name(metric, on_step=False)
        attribute = metric.meta.metric_attribute
        objects[key] = {"names": names, "attribute": attribute, "is_due": is_due}
    return objects


def _compute_together(connector: Any, key: str, entry: Object) -> None:
    """Compute a metric that all ranks must compute at the same time."""
    trainer = connector.trainer
    metric = trainer._results.get(key)
    if metric is not None and not metric.has_reset:
        metric._computed = None
        if not metric.is_tensor:
            # One rank may have a value that another one has not, and would not take part.
            metric.value._computed = None
        metric.compute()
    elif entry["attribute"]:
        # This rank has logged nothing, and the others wait for its part.
        of_module = trainer.lightning_module.get_submodule(entry["attribute"])
        of_module._computed = None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*called before the ``update`` method")
            value = of_module.compute()
        connector._callback_metrics.update(dict.fromkeys(entry["names"], value))


def _entry_of(metric: Any) -> Entry:
    """What a metric of ``self.log`` has summed up."""
    is_mean = metric.meta.on_epoch and metric.meta.is_mean_reduction
    weight = int(metric.cumulated_batch_size) if is_mean else 1
    reduction = metric.meta.reduce_fx.__name__
    return {"value": metric.value.item(), "weight": weight, "reduction": reduction}


def _sum_up(logs_of_ranks: list[Logs]) -> Logs:
    """Each metric over all ranks that have logged it; a mean stays a sum with its weight."""
    import torch

    entries: dict[str, list[Entry]] = {}
    for logs in logs_of_ranks:
        for key, entry in logs.items():
            entries.setdefault(key, []).append(entry)
    summed_up: Logs = {}
    # Every rank goes through them in the same order.
    for key in sorted(entries):
        first = entries[key][0]
        # The sum of a mean is divided by its weight where it is read.
        reduction = "sum" if first["reduction"] == "mean" else first["reduction"]
        reduce = getattr(torch, reduction)
        values = torch.tensor([entry["value"] for entry in entries[key]], dtype=torch.float64)
        weight = sum(entry["weight"] for entry in entries[key])
        summed_up[key] = {**first, "value": reduce(values).item(), "weight": weight}
    return summed_up


@cache  # once in a process, which may have several runs
def leave_out_empty_batches() -> None:
    """Keep a batch without samples out of the mean that Lightning 2.6 takes over an epoch.

    The last batch of a validation may have no sample for some rank. The mean over no samples is
    nan. Lightning multiplies it by the number of samples, and 0 times nan is nan too, so the metric
    would be nan on every rank.
    """
    import torch
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
    from lightning_utilities.core.apply_func import apply_to_collection

    update = _ResultMetric.update

    @wraps(update)
    def update_unless_empty(metric: _ResultMetric, value: Any, batch_size: int) -> None:
        if batch_size == 0:  # an object of torchmetrics stays as it is
            value = apply_to_collection(value, torch.Tensor, torch.zeros_like)
        update(metric, value, batch_size)

    _ResultMetric.update = update_unless_empty  # type: ignore[method-assign, assignment]


@cache  # once in a process, which may have several runs
def add_without_checks() -> None:
    """Add to a mean of the training at once, where ``self.log`` is called as in the step before.

    Each time Lightning 2.6 checks all arguments, inspects ``training_step``, and looks for tensors
    to move in everything that it knows of the metric: 0.5 ms for each metric in each step.
    """
    import lightning as L
    from torch import Tensor

    log = L.LightningModule.log

    @wraps(log)
    def log_or_add(
        module: L.LightningModule, name: str, value: Any, *args: Any, **options: Any
    ) -> None:
        trainer: Any = module._trainer
        results: Any = getattr(trainer, "_results", None)
        calls = getattr(results, "calls", {})  # of training only
        connector: Any = getattr(trainer, "_logger_connector", None)
        is_first_batch = getattr(connector, "_first_loop_iter", None)
        fx, graph = module._current_fx_name, options.get("enable_graph", False)
        call = fx, getattr(value, "device", None), args, options
        if calls.get(name) != (type(value), is_first_batch, options.get("on_step"), graph, *call):
            log(module, name, value, *args, **options)
            calls[name] = Tensor, False, False, False, *call
            return
        metric = results[f"{fx}.{name}"]
        size = results._extract_batch_size(metric, options.get("batch_size"), metric.meta)
        metric.forward(value.detach(), size)
        metric.has_reset = False
        connector._current_fx = fx

    L.LightningModule.log = log_or_add  # type: ignore[method-assign, assignment]


def logged_metrics(trainer: "L.Trainer", *, on_step: bool) -> dict[str, dict[str, Any]]:
    """What the training has logged: for the last batch, or so far for the epoch.

    ``log`` is for loggers, and ``pbar`` for a progress bar.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    metrics: dict[str, dict[str, Any]] = loop._results.metrics(on_step=on_step)
    return metrics


def num_logged_steps(trainer: "L.Trainer") -> int:
    """The steps by which Lightning 2.6 counts what it logs.

    These are optimizer steps, but with manual optimization batches: one may have no step, or two.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def num_logged_steps_of(checkpoint: dict[str, Any]) -> int:
    """``num_logged_steps`` of a run that continues from this checkpoint."""
    loop: dict[str, Any] = checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]
    return int(loop["_batches_that_stepped"])


def set_logged_steps(trainer: "L.Trainer", step: int) -> None:
    """Let Lightning 2.6 log what an evaluation logs as of this step: it has not trained."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def collect_logs(trainer: "L.Trainer") -> Logs:
    """What the training has logged in this epoch, for a checkpoint.

    Lightning 2.6 logs the last value of a step again in a step in which the module logs nothing.
    """
    from lightning.pytorch.utilities.memory import recursive_detach

    loop: Any = trainer.fit_loop.epoch_loop
    results = loop._results
    logs: Logs = {}
    for key, metric in results.valid_items():
        entry = _entry_of(metric) if metric.is_tensor else OF_OBJECT
        logs[key] = {
            **entry,
            "dtype": str(metric.value.dtype).removeprefix("torch."),
            "last": recursive_detach(results._get_cache(metric, on_step=True), to_cpu=True),
            "flags": {name: getattr(metric.meta, name) for name in FLAGS},
            "sync": [metric.meta.sync.should, metric.meta.sync.rank_zero_only],
        }
    return logs


def resume_logs(
    trainer: "L.Trainer", module: "L.LightningModule", logs_of_ranks: list[Logs]
) -> None:
    """Let the metrics of this epoch continue from what ``collect_logs`` gave on some ranks."""
    import torch
    from lightning.pytorch.trainer.connectors.logger_connector import result

    class Resumed(result._Metadata):
        """How a metric was logged before; how the program logs it next replaces this.

        Lightning 2.6 compares the two. On another number of ranks they differ, no checkpoint can
        hold a process group, and the program may have changed what goes into the progress bar.
        """

        def __ne__(self, given: object) -> bool:
            self.__dict__.update(given.__dict__)
            self.__class__ = result._Metadata  # type: ignore[assignment]
            return False

    loop: Any = trainer.fit_loop.epoch_loop
    connector: Any = trainer._logger_connector
    parts: dict[str, Any] = dict(module.named_modules())
    for key, entry in _sum_up(logs_of_ranks).items():
        attribute = entry["flags"]["metric_attribute"]
        if attribute and attribute not in parts:
            continue  # an object that is no part of the module
        meta = Resumed(**entry["flags"], reduce_fx=entry["reduction"])
        meta.sync = result._Sync(trainer.strategy.reduce, *entry["sync"])
        metric: Any = result._ResultMetric(meta, is_tensor=not attribute)
        if attribute:
            metric.value = parts[attribute]
        else:
            metric.value = torch.tensor(entry["value"], dtype=getattr(torch, entry["dtype"]))
            metric.cumulated_batch_size = torch.tensor(entry["weight"])
        metric._forward_cache = entry["last"]
        metric._update_count = 1
        loop._results[key] = metric.to(trainer.strategy.root_device)
        # Lightning resets numbers in the first batch of an epoch, and this epoch has had it.
        connector._first_loop_iter = True


def log_epoch_means(trainer: "L.Trainer") -> None:
    """Log the mean over the epoch of training metrics that the module logs per step only.

    That of ``train/loss`` is ``train/loss_epoch``, as Lightning names it with ``on_epoch=True``.
    A curve of single batches beside the mean of the validation would compare two different things.
    """
    import torch

    loop: Any = trainer.fit_loop.epoch_loop
    results: Any = loop._results
    # A second fit of the same Trainer must not add each value twice.
    if "calls" in results.__dict__:
        return
    results.calls = {}
    log = results.log

    def log_with_mean(fx: str, name: str, value: Any, **options: Any) -> None:
        log(fx, name, value, **options)
        is_number = isinstance(value, torch.Tensor) and not options["rank_zero_only"]
        is_mean = options["reduce_fx"] in ("mean", torch.mean)
        flags = fx, options["on_step"], options["on_epoch"]
        is_per_step = flags == ("training_step", True, False)
        if not (is_per_step and is_number and is_mean) or not OF_TRAINING.fullmatch(name):
            return
        size = options["batch_size"] or size_of(results.batch)
        epoch_name = f"{name.removesuffix('_step')}_epoch"
        # Under a hook of its own: a module may log this name too, with other flags.
        log(MEAN_HOOK, epoch_name, value, logger=options["logger"], batch_size=size)

    results.log = log_with_mean


def size_of(batch: Any) -> int:
    """The samples of a batch; 1 if that cannot be seen, so that all batches count the same."""
    from lightning.pytorch.utilities.data import extract_batch_size

    with warnings.catch_warnings():
        # The module has not asked for a mean, so it needs no advice about its batches.
        warnings.simplefilter("ignore")
        try:
            return extract_batch_size(batch)
        # Lightning raises its own error, and a batch may raise any when it is iterated.
        except Exception:
            return 1


def logged_metric_ids(trainer: "L.Trainer") -> set[int]:
    """The ids of torchmetrics objects that Lightning 2.6 resets when the epoch is over."""
    loop: Any = trainer.fit_loop.epoch_loop
    return {id(metric.value) for metric in loop._results.values() if not metric.is_tensor}


def metric_state(metric: "Metric") -> dict[str, Any]:
    """What a metric of torchmetrics 1.9 has counted, and in how many updates."""
    from lightning.fabric.utilities import move_data_to_device

    return {"count": metric.update_count, "states": move_data_to_device(metric.metric_state, "cpu")}


def has_counted(metric: "Metric") -> bool:
    """Whether a metric of torchmetrics 1.9 has counted anything since it was made or reset."""
    import torch

    if metric.update_called:
        return True
    # A wrapper, such as Running, may call the update of the metric in it instead of its own.
    for name, default in metric._defaults.items():
        state: Any = getattr(metric, name)
        is_list = isinstance(state, list)
        has_changed = bool(state) if is_list else not torch.equal(state.cpu(), default.cpu())  # type: ignore[union-attr]
        if has_changed:
            return True
    return False


def counts_of(metric: "Metric") -> set[str]:
    """The names of the attributes in which a metric of torchmetrics 1.9 counts."""
    return {*metric.metric_state, "_update_count", "_computed"}


def resume_metric(metric: "Metric", saved: list[dict[str, Any]]) -> None:
    """Continue from what ``metric_state`` gave on some ranks.

    Raises:
        RuntimeError: if the metric cannot merge the states of several ranks; it is empty then.
    """
    import torch
    from lightning_utilities.core.apply_func import apply_to_collection

    for number, state in enumerate(saved):
        # A copy: two metrics of a collection may have one tensor, to which each would add.
        states = apply_to_collection(
            state["states"], torch.Tensor, torch.Tensor.to, device=metric.device, copy=True
        )
        if number == 0:
            for name, value in states.items():
                setattr(metric, name, value)
        else:
            metric.merge_state(states)
        metric._update_count += state["count"]
