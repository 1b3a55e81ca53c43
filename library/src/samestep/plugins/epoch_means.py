"""The mean over the epoch of what a module logs per step only, and a shorter way to log.

That of ``train/loss`` is ``train/loss_epoch``, as Lightning names it with ``on_epoch=True``. Beside
the mean of the validation, a curve of single batches would compare two different things.
"""

import re
import warnings
from functools import cache, wraps
from typing import Any

import lightning as L
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from samestep.run_spec import RunSpec

MEAN_HOOK = "epoch_mean"
"""Stands for the hook in which the means of ``log_epoch_mean`` are logged."""
OF_TRAINING = re.compile(r"train[/_].+|.+[/_]train|(.+[/_])?loss(_step)?")
"""What describes the training among the metrics that it logs: ``train/score``, or any loss."""


def callback(spec: RunSpec) -> L.Callback:
    """``EpochMeans``, which every run has."""
    add_without_checks()
    return EpochMeans()


class EpochMeans(L.Callback):
    """Lets the metrics of the training be logged so."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to note, by its name, how each metric was logged last."""
        loop: Any = trainer.fit_loop.epoch_loop
        loop._results.calls = {}


@cache  # once in a process, which may have several runs
def add_without_checks() -> None:
    """Add to a mean of the training at once, where ``self.log`` is called as in the step before.

    Each time Lightning 2.6 checks all arguments, inspects ``training_step``, and looks for tensors
    to move in everything that it knows of the metric: 0.5 ms for each metric in each step.
    """
    log = L.LightningModule.log

    @wraps(log)
    def log_or_add(
        module: L.LightningModule, name: str, value: Any, *args: Any, **options: Any
    ) -> None:
        results: Any = getattr(module._trainer, "_results", None)
        calls = getattr(results, "calls", None)  # of training only
        if calls is None:
            log(module, name, value, *args, **options)
            return
        fx: Any = module._current_fx_name
        connector: Any = module._trainer._logger_connector  # type: ignore[union-attr]
        flags = type(value), connector._first_loop_iter, options.get("on_step")
        graph, batch_size = options.get("enable_graph", False), options.get("batch_size")
        arguments = graph, fx, getattr(value, "device", None), args, options
        if calls.get(name) != (*flags, *arguments):
            log(module, name, value, *args, **options)
            log_epoch_mean(results, fx, name, value, batch_size)
            calls[name] = Tensor, False, False, False, *arguments[1:]
            return
        metric = results[f"{fx}.{name}"]
        metric.forward(value.detach(), results._extract_batch_size(metric, batch_size, metric.meta))
        metric.has_reset = False
        connector._current_fx = fx

    L.LightningModule.log = log_or_add  # type: ignore[method-assign, assignment]


def log_epoch_mean(results: Any, fx: str, name: str, value: Any, batch_size: int | None) -> None:
    """Log the mean over the epoch of a metric of the training that was logged per step only."""
    metric = results[f"{fx}.{name}"]
    meta = metric.meta
    is_per_step = fx == "training_step" and meta.on_step and not meta.on_epoch
    is_mean = metric.is_tensor and meta.is_mean_reduction and not meta.sync.rank_zero_only
    if is_per_step and is_mean and OF_TRAINING.fullmatch(name):
        own = value if isinstance(value, Tensor) else metric.value
        size = batch_size or size_of(results.batch)
        epoch_name = f"{name.removesuffix('_step')}_epoch"
        # Under a hook of its own: a module may log this name too, with other flags.
        results.log(MEAN_HOOK, epoch_name, own, logger=meta.logger, batch_size=size)


def size_of(batch: Any) -> int:
    """The samples of a batch; 1 if that cannot be seen, so that all batches count the same."""
    with warnings.catch_warnings():
        # The module has not asked for a mean, so it needs no advice about its batches.
        warnings.simplefilter("ignore")
        try:
            return extract_batch_size(batch)
        # Lightning raises its own error, and a batch may raise any when it is iterated.
        except Exception:
            return 1
