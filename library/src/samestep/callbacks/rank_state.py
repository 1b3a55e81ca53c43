"""What each rank has of its own within an epoch, and what all ranks must have in common.

Lightning saves the state of rank zero. Within an epoch the others have buffers, sums of metrics and
gradients of their own.
"""

import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parameter import is_lazy
from torchmetrics import Metric, MetricCollection

from samestep.callbacks.run_state import Part, Saved
from samestep.ranks import epoch_logs, process_group, virtual
from samestep.ranks.compat import callbacks_of
from samestep.ranks.epoch_sums import EpochSums, has_counted
from samestep.run.checkpoint import map_tensors

log = logging.getLogger(__name__)

State = dict[str, Any]
"""Of one slice: ``sums``, ``buffers``, ``numbers``, ``gradients``, ``logged``, ``metrics`` and
``callbacks``."""


class RankState(Part):
    """Saves what each rank has of its own within an epoch, and gives all ranks the same buffers.

    A checkpoint within an epoch holds for each rank:

    - its buffers, such as the running statistics of batch norm;
    - the sums of ``EpochMean``, ``self.log`` and torchmetrics, also of metrics that span epochs,
      and how many of these a MetricTracker has made;
    - with manual optimization its gradients, because only the module knows when it takes a step;
    - the states of ModelCheckpoint and EarlyStopping, whose metrics may differ between ranks.

    On the same number of ranks each gets its own state back, and so does each of as many virtual
    ranks. On another number rank zero gets all sums, gradients become their mean, and all ranks get
    the buffers of rank zero.

    So they do before each validation and at the end of each epoch, as under DDP: every rank and the
    checkpoint hold the same model.
    """

    key = "ranks"

    def __init__(self) -> None:
        self._saved: list[State] = []  # of all slices, from a checkpoint
        self._is_same_number = True  # of slices, as now
        self._gradients: dict[str, Tensor] = {}  # of all ranks, if they are sharded

    def save(self, trainer: L.Trainer, checkpoint: dict[str, Any]) -> list[State]:
        """Keep the state of this rank: of each of its slices."""
        return virtual.each(lambda: self._save_slice(trainer, checkpoint))

    def _save_slice(self, trainer: L.Trainer, checkpoint: dict[str, Any]) -> State:
        pl_module = trainer.lightning_module
        sums = {name: part.state() for name, part in epoch_sums(pl_module).items()}
        own: State = {"sums": sums}
        # One slice has no other buffers than those that Lightning saves.
        if virtual.is_shared():
            own["buffers"] = on_cpu(buffers_of(pl_module))
            states = {one.state_key: one.state_dict() for one in find_deciders(trainer)}
            own["callbacks"] = map_tensors(states, lambda _, tensor: tensor.cpu())
        if virtual.layout().is_virtual:
            own["numbers"] = virtual.numbers_of(pl_module)
        if not pl_module.automatic_optimization:
            own["gradients"], checkpoint["gradients"] = split_gradients(pl_module)
        return own | self._collect_metrics(trainer, pl_module)

    def _collect_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> State:
        epochs: Any = trainer.fit_loop.epoch_progress.current
        is_within_epoch = epochs.processed < epochs.ready
        if is_within_epoch:
            logs, ended = epoch_logs.collect_logs(trainer), set[int]()
        else:
            # Lightning resets what it has logged when an epoch is over, or has done so.
            logs, ended = {}, epoch_logs.logged_metric_ids(trainer)
        metrics = {}
        for name, metric in metrics_of(pl_module).items():
            if id(metric) not in ended and has_counted(metric):
                metrics[name] = epoch_logs.metric_state(metric)
        return {"logged": logs, "metrics": metrics}

    def load(self, trainer: L.Trainer, checkpoint: dict[str, Any], saved: Saved) -> None:
        """Remember it until training starts: the strategy still moves the model until then."""
        self._saved = [*chain.from_iterable(saved.ranks)]
        self._is_same_number = len(self._saved) == virtual.layout().total
        self._gradients = checkpoint.get("gradients", {})
        if saved.is_same_number:
            # Lightning gives each callback its state after this. The checkpoint has that of rank
            # zero: with it, this rank may disagree with a save for which it has voted before.
            checkpoint["callbacks"].update(saved.own[0].get("callbacks", {}))

    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the state of this rank, when every hook of the start is through.

        A module may reset its metrics in ``on_train_start``, to forget the sanity check.
        """
        virtual.each(lambda: self._restore_slice(trainer, pl_module))
        self._saved = []

    def _restore_slice(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        states = self._states()
        if states:
            # One slice has saved no buffers, and only virtual ranks have saved numbers.
            replace_buffers(pl_module, states[0].get("buffers", {}))
            virtual.set_numbers(pl_module, states[0].get("numbers", {}))
        self._restore_gradients(pl_module, states)
        # On another number of ranks the sums must not be counted twice.
        counts = self._is_same_number or virtual.current() == 0
        self._restore_metrics(trainer, pl_module, states if counts else [])

    def _states(self) -> list[State]:
        """What the current slice continues with: its own state, or those of all."""
        if self._is_same_number and self._saved:
            return [self._saved[virtual.current()]]
        return self._saved

    def deal(self, trainer: L.Trainer, shares: Sequence[float]) -> None:
        """Let each rank have so many slices, with what these keep; every rank must call this."""
        module = trainer.lightning_module
        self._saved = virtual.gather(lambda: self._save_slice(trainer, {}))
        self._is_same_number = True
        virtual.use(len(self._saved), shares)
        virtual.begin_stage(module, trainer.fit_loop.epoch_loop)
        self.begin(trainer, module)

    def _restore_gradients(self, pl_module: L.LightningModule, states: list[State]) -> None:
        for name, parameter in pl_module.named_parameters():
            saved = pick(states, "gradients", name)
            if saved:
                # A rank without a gradient counts as one with zeros.
                mean = mean_of(saved) * (len(saved) / len(states))
                parameter.grad = place_as(parameter, mean.to(parameter.device))
            elif name in self._gradients:
                parameter.grad = self._gradients[name].to(parameter.device)

    def _restore_metrics(
        self, trainer: L.Trainer, pl_module: L.LightningModule, states: list[State]
    ) -> None:
        for name, part in epoch_sums(pl_module).items():
            sums = pick(states, "sums", name)
            if sums:
                part.load_state(torch.stack(sums).sum(0))
        epoch_logs.resume_logs(trainer, pl_module, [state.get("logged", {}) for state in states])
        for name, metric in metrics_of(pl_module).items():
            try:
                epoch_logs.resume_metric(metric, pick(states, "metrics", name))
            except RuntimeError as error:
                metric.reset()
                log.warning("%s counts the rest of this epoch only: %s", name, error)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Validate and save the same model on every rank."""
        if virtual.is_shared():
            share_buffers(pl_module)

    on_train_epoch_end = on_validation_start


def find_deciders(trainer: L.Trainer) -> list[L.Callback]:
    """The callbacks of Lightning that decide by a metric, by a vote of all ranks."""
    found: list[L.Callback] = callbacks_of(trainer, ModelCheckpoint)
    found += callbacks_of(trainer, EarlyStopping)
    return found


def split_gradients(
    module: L.LightningModule,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients of this rank, and those that are sharded over the ranks, by parameter."""
    own: dict[str, Tensor] = {}
    sharded: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if isinstance(parameter.grad, DTensor):
            # It is the mean over the ranks already, and saved as the weights are.
            sharded[name] = parameter.grad
        elif parameter.grad is not None:
            own[name] = parameter.grad.cpu()
    return own, sharded


def place_as(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """A tensor that every rank has whole, sharded as a parameter is."""
    if not isinstance(parameter, DTensor):
        return whole
    # Without a source none must send it to the others.
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def pick(states: list[State], kind: str, name: str) -> list[Any]:
    """The entries of one name in the states of some ranks, where they have it."""
    return [state[kind][name] for state in states if name in state.get(kind, {})]


def mean_of(tensors: list[Tensor]) -> Tensor:
    """The mean of tensors of one shape; of one tensor this tensor, bit for bit."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.stack(tensors).mean(0)


def epoch_sums(module: nn.Module) -> dict[str, EpochSums]:
    """Every ``EpochSums`` within a module, such as an ``EpochMean``, by its name there."""
    return parts_of_kind(module, EpochSums)


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of a module by name, without those that have no elements."""
    buffers = {}
    for name, buffer in module.named_buffers():
        # A lazy buffer has no size before its first batch.
        if is_lazy(buffer):
            continue
        if buffer.numel():
            buffers[name] = buffer
    return buffers


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def share_buffers(module: nn.Module) -> None:
    """Give all slices the buffers of the first one; every rank must call this.

    Hooks between two steps change those of the first slice of each process, and some do so past
    autograd (``buffer.data``), where nothing would notice it.
    """
    of_zero = process_group.broadcast(on_cpu(buffers_of(module)))
    virtual.each(lambda: replace_buffers(module, of_zero))


# A buffer may need a gradient itself, by the user or where a library has set it.
@torch.no_grad()
def replace_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give buffers other values; in place, unless one has grown."""
    for name, old in buffers_of(module).items():
        value = values.get(name, old)
        if old.shape == value.shape:
            old.copy_(value)
            continue
        path, _, last = name.rpartition(".")
        # A validation is in inference mode, and a step could not change a tensor made there.
        with torch.inference_mode(False):
            setattr(module.get_submodule(path), last, value.to(old.device).clone())


def metrics_of(module: nn.Module) -> dict[str, Metric]:
    """Every metric of torchmetrics within a module, by its name there."""
    for collection in parts_of_kind(module, MetricCollection).values():
        # Members with equal states update one of them only; reading them brings all up to date.
        list(collection.items(keep_base=True, copy_state=False))
    return parts_of_kind(module, Metric)


def parts_of_kind(module: nn.Module, kind: type[Any]) -> dict[str, Any]:
    """Every part of a module that is of this class, by its name there."""
    return {name: part for name, part in module.named_modules() if isinstance(part, kind)}
