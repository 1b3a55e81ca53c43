"""What each rank has of its own within an epoch, and what all ranks must have in common.

Lightning saves the state of rank zero. Within an epoch the others have buffers, sums of metrics and
gradients of their own.
"""

import logging
from collections.abc import Container, Iterable, Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parameter import is_lazy
from torchmetrics import Metric, MetricCollection

from samestep.callbacks.notes import note_rank_zero_counts
from samestep.callbacks.run_state import Part, Saved
from samestep.data.loaders import weights_of_ranks
from samestep.ranks import epoch_logs, process_group
from samestep.ranks.compat import callbacks_of
from samestep.ranks.epoch_sums import EpochSums
from samestep.ranks.strategies import class_of
from samestep.run.checkpoint import map_tensors

log = logging.getLogger(__name__)

State = dict[str, Any]
"""Of one rank: ``weight``, ``sums``, ``buffers``, ``gradients``, ``logged``, ``metrics``
and ``callbacks``."""


class RankState(Part):
    """Saves what each rank has of its own within an epoch, and gives all ranks the same buffers.

    A checkpoint within an epoch holds for each rank:

    - its buffers, such as the running statistics of batch norm;
    - the sums of ``EpochMean``, ``self.log`` and torchmetrics, also of metrics that span epochs,
      and how many of these a MetricTracker has made;
    - with manual optimization its gradients, because only the module knows when it takes a step;
    - the states of ModelCheckpoint and EarlyStopping, whose metrics may differ between ranks.

    On the same number of ranks each gets its own state back. On another number, buffers and
    gradients become their mean, and rank zero gets all sums.

    Before each validation and at the end of each epoch the buffers become their mean over the
    ranks, weighted by the samples of each, so that every rank and the checkpoint hold the same
    model. Integers have no mean: where they differ, all ranks get those of rank zero, as under DDP.
    So they do with all buffers of a part that has a table of integers which differ, such as a queue
    of samples and their numbers: its floats belong to these integers.
    """

    key = "ranks"

    def __init__(self) -> None:
        self._saved: list[State] = []  # of this rank, or of all, from a checkpoint
        self._gradients: dict[str, Tensor] = {}  # of all ranks, if they are sharded
        self._sums: list[State] = []  # what this rank restores when every hook has run
        self._has_own_sums = True

    def save(self, trainer: L.Trainer, checkpoint: dict[str, Any]) -> State:
        """Keep the state of this rank."""
        pl_module = trainer.lightning_module
        sums = {name: part.state() for name, part in epoch_sums(pl_module).items()}
        own: State = {"weight": weights_of_ranks(trainer)[trainer.global_rank], "sums": sums}
        # One rank has no other buffers than those that Lightning saves.
        if trainer.world_size > 1:
            own["buffers"] = on_cpu(buffers_of(pl_module))
            states = {one.state_key: one.state_dict() for one in find_deciders(trainer)}
            own["callbacks"] = map_tensors(states, lambda _, tensor: tensor.cpu())
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
            if id(metric) not in ended and epoch_logs.has_counted(metric):
                metrics[name] = epoch_logs.metric_state(metric)
        return {"logged": logs, "metrics": metrics}

    def load(self, trainer: L.Trainer, checkpoint: dict[str, Any], saved: Saved) -> None:
        """Remember it until training starts: the strategy still moves the model until then."""
        self._saved = saved.ranks
        self._gradients = checkpoint.get("gradients", {})
        self._has_own_sums = saved.is_same_number or trainer.is_global_zero
        if saved.is_same_number:
            self._saved = [saved.own | {"weight": 1.0}]
            # Lightning gives each callback its state after this. The checkpoint has that of rank
            # zero: with it, this rank may disagree with a save for which it has voted before.
            checkpoint["callbacks"].update(saved.own.get("callbacks", {}))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the state of this rank, but for what it has counted."""
        states, self._saved = self._saved, []
        self._restore_buffers(trainer, pl_module, states)
        self._restore_gradients(pl_module, states)
        # On another number of ranks the sums must not be counted twice.
        self._sums = states if self._has_own_sums else []

    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore what this rank has counted, when every hook of the start is through.

        A module may reset its metrics in ``on_train_start``, to forget the sanity check.
        """
        states, self._sums = self._sums, []
        self._restore_metrics(trainer, pl_module, states)

    # A buffer may need a gradient itself, by the user or where a library has set it.
    @torch.no_grad()
    def _restore_buffers(
        self, trainer: L.Trainer, pl_module: L.LightningModule, states: list[State]
    ) -> None:
        # One rank has saved none.
        states = [state for state in states if "buffers" in state]
        if not states:
            return
        unequal = set[str]()
        for state in states:
            unequal |= find_unequal(state["buffers"], states[0]["buffers"])
        without_mean = find_parts_without_mean(unequal, states[0]["buffers"])
        for name, buffer in buffers_of(pl_module).items():
            owners = [state for state in states if name in state["buffers"]]
            if not owners:
                continue
            if is_averaged(name, buffer, without_mean):
                buffer.copy_(weighted_mean(owners, name))
            else:
                replace_buffer(pl_module, name, owners[0]["buffers"][name])
        prefix = class_of(pl_module).__name__
        names = [f"{prefix}.{name}" for name in sorted(unequal)]
        note_rank_zero_counts(trainer, names, len(states))

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

    @torch.no_grad()
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Validate and save the same model on every rank."""
        if trainer.world_size == 1:
            return
        without_mean = copy_from_rank_zero(pl_module)
        weight = weights_of_ranks(trainer)[trainer.global_rank]
        for name, buffer in buffers_of(pl_module).items():
            if is_averaged(name, buffer, without_mean):
                buffer.copy_(trainer.strategy.reduce(weight * buffer, reduce_op="mean"))

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


def weighted_mean(states: list[State], name: str) -> Tensor:
    """The mean of a buffer over the ranks, by the samples of each."""
    return mean_of([state["weight"] * state["buffers"][name] for state in states])


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


def has_mean(buffer: Tensor) -> bool:
    """Whether a buffer has a mean over the ranks: it is no counter or index."""
    return buffer.is_floating_point()


def is_averaged(name: str, buffer: Tensor, without_mean: Container[str]) -> bool:
    """Whether a buffer becomes its mean over the ranks; see ``find_parts_without_mean``."""
    return has_mean(buffer) and path_of(name) not in without_mean


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors on the CPU."""
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def path_of(name: str) -> str:
    """The name of the part of a module that has the buffer of this name."""
    return name.rpartition(".")[0]


def copy_from_rank_zero(module: nn.Module) -> set[str]:
    """Give all ranks the integers of rank zero, where they differ; each rank must call this.

    Returns:
        The names of the parts whose other buffers are those of rank zero too.
    """
    buffers = buffers_of(module)
    own = on_cpu({name: buffer for name, buffer in buffers.items() if not has_mean(buffer)})
    if not own:
        return set()
    of_zero = process_group.broadcast(own)
    # Rank zero differs from none, and has to send more if another rank does.
    unequal = set[str]().union(*process_group.gather(find_unequal(own, of_zero)))
    without_mean = find_parts_without_mean(unequal, of_zero)
    if without_mean:
        rest = {name: buffer for name, buffer in buffers.items() if path_of(name) in without_mean}
        of_zero |= process_group.broadcast(on_cpu(rest))
    for name, value in of_zero.items():
        if name in unequal or path_of(name) in without_mean:
            replace_buffer(module, name, value)
    return without_mean


def find_unequal(own: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> set[str]:
    """The names of the integers that differ, of those that both ranks have."""
    unequal = set()
    for name, value in own.items():
        if name in others and not has_mean(value) and not torch.equal(value, others[name]):
            unequal.add(name)
    return unequal


def find_parts_without_mean(unequal: Iterable[str], values: Mapping[str, Tensor]) -> set[str]:
    """The names of the parts that have a table of integers which differ.

    One integer counts something, such as samples: what is beside it may be a running mean. Many
    integers say what the rows beside them are, so that the mean of two rows would be of nothing.
    """
    return {path_of(name) for name in unequal if values[name].numel() > 1}


def replace_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    """Give a buffer another value; in place, unless it has grown."""
    old = module.get_buffer(name)
    if old.shape == value.shape:
        old.copy_(value)
        return
    owner = module.get_submodule(path_of(name))
    # A validation is in inference mode, and a step could not change a tensor that is made there.
    with torch.inference_mode(False):
        setattr(owner, name.rpartition(".")[2], value.to(old.device).clone())


def metrics_of(module: nn.Module) -> dict[str, Metric]:
    """Every metric of torchmetrics within a module, by its name there."""
    for collection in parts_of_kind(module, MetricCollection).values():
        # Members with equal states update one of them only; reading them brings all up to date.
        list(collection.items(keep_base=True, copy_state=False))
    return parts_of_kind(module, Metric)


def parts_of_kind(module: nn.Module, kind: type[Any]) -> dict[str, Any]:
    """Every part of a module that is of this class, by its name there."""
    return {name: part for name, part in module.named_modules() if isinstance(part, kind)}
