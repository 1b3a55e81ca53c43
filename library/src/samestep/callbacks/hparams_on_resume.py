"""Values of optimizers and schedules that the configuration has changed when a run resumes."""

from copy import deepcopy
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.optim import Optimizer

from samestep.callbacks.checks import check_supported
from samestep.errors import ConfigError
from samestep.option_names import setting
from samestep.ranks import compat
from samestep.ranks.compat import callbacks_of
from samestep.ranks.sharded import ShardedStrategy

Values = dict[str, Any]

TRACKS = "track_running_stats"  # of batch norm; BaseFinetuning sets it


class HparamsOnResume(L.Callback):
    """Gives a run that resumes the values of its new configuration: learning rate, length...

    A checkpoint holds the values of optimizers and schedules, and Lightning restores them all. So
    neither another learning rate nor another length of the run would have an effect: a one-cycle
    schedule would even end with an error after its old number of steps. Therefore a checkpoint
    also keeps the values with which the run began. If a value begins differently now, the new
    configuration has changed it, and the new value counts. All other values are restored: momentum,
    the position of a schedule.

    Parameters may be frozen, unfrozen or given to an optimizer in a new group while the
    run trains, as callbacks for fine-tuning do. A checkpoint keeps that too.

    A changed learning rate is scaled to the position of the schedule. The first step still takes
    the position of the checkpoint, and the schedule sets the rate of the second one.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._begin: Values = {}
        """With which values optimizers and schedules begin, by this configuration."""
        self._saved_begin: Values = {}
        """The same in the checkpoint from which the run resumes."""
        self._schedules: list[Values] = []
        """The states of the schedules in that checkpoint."""
        self._modes: Values = {}
        """Which parameters were frozen in that checkpoint."""
        self._added: list[list[list[str]]] = []
        """The groups that each optimizer got before that checkpoint: the names of parameters."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Forget an earlier ``fit``, and check the callbacks that the module itself has brought.

        Raises:
            ConfigError: if one of them is not supported.
        """
        # A second `fit` begins with new optimizers, and must not compare them with those of a
        # checkpoint that the first one has read.
        if stage == "fit":
            self._reset()
        is_sharded = isinstance(trainer.strategy, ShardedStrategy)
        for callback in callbacks_of(trainer, L.Callback):
            check_supported(callback, f"{type(pl_module).__name__}.configure_callbacks")
            if is_sharded and compat.averages_weights(callback):
                raise ConfigError(
                    f"callbacks: {type(callback).__name__} is not supported with "
                    f"{setting('strategy', 'fsdp')}: torch cannot copy a sharded model; use ddp"
                )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the first values, before Lightning restores the saved ones."""
        self._begin = read_values(trainer)
        self._begin["modes"] = read_modes(pl_module)
        self._check_kinds()
        self._add_groups(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: Values
    ) -> None:
        """Keep the values with which the run began, and what was frozen or added since."""
        checkpoint["begin"] = self._begin
        checkpoint["modes"] = read_modes(pl_module)
        # By names: another process has other parameters, and a new group may change their order.
        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        # Another callback may save before training begins, when nothing was added.
        num_groups = self._begin.get("num_groups", [])
        added = []
        for optimizer, num in zip(trainer.optimizers, num_groups, strict=False):
            groups = []
            for group in optimizer.param_groups[num:]:
                groups.append([names[parameter] for parameter in group["params"]])
            added.append(groups)
        checkpoint["added_groups"] = added

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: Values
    ) -> None:
        """Keep the states of the schedules from Lightning, until all values are known."""
        if trainer.state.fn != "fit":
            return
        self._saved_begin = checkpoint.get("begin", {})
        self._schedules = checkpoint["lr_schedulers"]
        checkpoint["lr_schedulers"] = []
        self._modes = checkpoint.get("modes", {})
        self._added = checkpoint.get("added_groups", [])
        self._check_kinds()
        # Some strategies load the checkpoint after ``on_fit_start``.
        if self._begin:
            self._add_groups(trainer, pl_module)
        for stopping in callbacks_of(trainer, EarlyStopping):
            # The checkpoint has no state of one that is new.
            state = checkpoint["callbacks"].get(stopping.state_key, {})
            # Lightning would restore the old patience, and a longer one would have no effect.
            state["patience"] = stopping.patience

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the schedules, and set the values that have changed."""
        # The run starts here.
        if not self._saved_begin:
            return
        self._update_groups(trainer)
        self._update_schedules(trainer)
        # If the module begins with other parameters frozen now, its new choice counts.
        if self._saved_begin["modes"] == self._begin["modes"]:
            set_modes(pl_module, self._modes)

    def _update_groups(self, trainer: L.Trainer) -> None:
        """Set what the configuration has changed in the groups of the optimizers."""
        groups: list[Values] = []
        for optimizer, num in zip(trainer.optimizers, self._begin["num_groups"], strict=True):
            # Groups that were added while the run trained have no first values.
            groups += optimizer.param_groups[:num]
        before, after = self._saved_begin["groups"], self._begin["groups"]
        for group, old, new in zip(groups, before, after, strict=True):
            lr = scaled_lr(group, old, new)
            group.update(merge(group, old, new))
            group["lr"] = lr

    def _update_schedules(self, trainer: L.Trainer) -> None:
        """Restore the schedules, except what the configuration has changed in them."""
        before, after = self._saved_begin["schedules"], self._begin["schedules"]
        states = map(merge, self._schedules, before, after)
        for config, state in zip(trainer.lr_scheduler_configs, states, strict=False):
            config.scheduler.load_state_dict(state)
        self._schedules = []

    def _add_groups(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the optimizers the groups that they got before, so that their state fits."""
        parameters = dict(pl_module.named_parameters())
        for optimizer, groups in zip(trainer.optimizers, self._added, strict=False):
            for names in groups:
                optimizer.add_param_group({"params": [parameters[name] for name in names]})
        self._added = []

    def _check_kinds(self) -> None:
        """Reject the state of another kind of optimizer or schedule, before it is restored."""
        old, new = self._saved_begin.get("kinds"), self._begin.get("kinds")
        # Only one of both is known yet, or no checkpoint is loaded.
        if old is None or new is None or old == new:
            return
        raise ConfigError(
            f"the run cannot continue with {', '.join(new)}: its checkpoint has "
            f"{', '.join(old)}. Restore the old values, or start a new run"
        )


def read_values(trainer: L.Trainer) -> Values:
    """The kinds and the values of all optimizers and schedules."""
    kinds: list[str] = []
    num_groups: list[int] = []
    groups: list[Values] = []
    for optimizer in trainer.optimizers:
        kinds.append(describe_optimizer(optimizer))
        num_groups.append(len(optimizer.param_groups))
        for group in optimizer.param_groups:
            values = dict(group)
            del values["params"]
            # A learning rate may be a tensor, which is changed in place.
            groups.append(deepcopy(values))
    schedules: list[Values] = []
    for config in trainer.lr_scheduler_configs:
        kinds.append(type(config.scheduler).__name__)
        schedules.append(deepcopy(config.scheduler.state_dict()))
    return {
        "kinds": kinds,
        "num_groups": num_groups,
        "groups": groups,
        "schedules": schedules,
    }


def describe_optimizer(optimizer: Optimizer) -> str:
    """Its kind and the tensors of its groups, such as ``AdamW of 4 + 3 tensors``."""
    sizes = [str(len(group["params"])) for group in optimizer.param_groups]
    return f"{type(optimizer).__name__} of {' + '.join(sizes)} tensors"


def read_modes(module: nn.Module) -> Values:
    """What is frozen: parameters, modules that are not in training mode, statistics."""
    frozen, evaluating, untracked = [], [], []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            frozen.append(name)
    for name, part in module.named_modules():
        if not part.training:
            evaluating.append(name)
        if not getattr(part, TRACKS, True):
            untracked.append(name)
    return {"frozen": frozen, "evaluating": evaluating, "untracked": untracked}


def set_modes(module: nn.Module, modes: Values) -> None:
    """Freeze what ``read_modes`` has found, and nothing else."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in modes["frozen"])
    for name, part in module.named_modules():
        # Not by ``train()``, which would change the modules below it too.
        part.training = name not in modes["evaluating"]
        if hasattr(part, TRACKS):
            setattr(part, TRACKS, name not in modes["untracked"])


def merge(saved: Values, before: Values, after: Values) -> Values:
    """The saved values, except those that begin differently ``after`` than ``before``."""
    merged: Values = {}
    for name, value in saved.items():
        old: Any = before.get(name)
        new: Any = after.get(name)
        if old == new:
            merged[name] = value
        elif are_parallel(value, old, new):
            # A schedule made of schedules.
            merged[name] = list(map(merge, value, old, new))
        else:
            merged[name] = new
    return merged


def are_parallel(*values: Any) -> bool:
    """Whether these are lists of as many states of schedules."""
    return all(map(is_list_of_states, values)) and len(set(map(len, values))) == 1


def is_list_of_states(value: Any) -> bool:
    """Whether it is a list of the states of schedules."""
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def scaled_lr(saved: Values, before: Values, after: Values) -> Any:
    """The saved learning rate, scaled as the configuration has scaled the first one."""
    # A schedule has already changed "lr" when the values are read; it notes "initial_lr".
    name = "initial_lr" if "initial_lr" in before and "initial_lr" in after else "lr"
    # Zero cannot be scaled.
    if before[name] == after[name] or not before[name]:
        return saved["lr"]
    return saved["lr"] * after[name] / before[name]
