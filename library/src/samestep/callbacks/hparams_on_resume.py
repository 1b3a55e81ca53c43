"""Values of optimizers and schedules that the configuration has changed when a run continues."""

from copy import deepcopy
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, WeightAveraging
from torch import nn

from samestep.callbacks.checks import check_supported
from samestep.errors import ConfigError
from samestep.option_names import setting
from samestep.ranks.compat import callbacks_of
from samestep.ranks.sharded import ShardedStrategy

Values = dict[str, Any]

TRACKS = "track_running_stats"  # of batch norm; BaseFinetuning sets it


class HparamsOnResume(L.Callback):
    """Gives a run that continues the values of its new configuration: learning rate, length...

    A checkpoint holds the values of optimizers and schedules, and Lightning restores them all. So
    neither another learning rate nor another length of the run would have an effect: a one-cycle
    schedule would even end with an error after its old number of steps. Therefore a checkpoint
    also keeps the values with which the run began. If a value begins differently now, the new
    configuration has changed it, and the new one counts. All other values are restored: momentum,
    the position of a schedule.

    Parameters may be frozen, unfrozen or given to an optimizer in a group of their own while the
    run trains, as callbacks for fine-tuning do. A checkpoint keeps that too.

    A changed learning rate is scaled to the position of the schedule. The first step still takes
    the position of the checkpoint, and the schedule sets the rate of the second one.
    """

    def __init__(self) -> None:
        self._begin: Values = {}
        """With which values optimizers and schedules begin, by this configuration."""
        self._saved_begin: Values = {}
        """The same in the checkpoint from which the run continues."""
        self._schedules: list[Values] = []
        """The states of the schedules in that checkpoint."""
        self._modes: Values = {}
        """Which parameters were frozen in that checkpoint."""
        self._added: list[list[list[str]]] = []
        """The groups that each optimizer got before that checkpoint: the names of parameters."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check the callbacks that the module itself has brought."""
        for callback in callbacks_of(trainer, L.Callback):
            check_supported(callback, f"{type(pl_module).__name__}.configure_callbacks")
            is_sharded = isinstance(trainer.strategy, ShardedStrategy)
            if is_sharded and isinstance(callback, WeightAveraging):
                raise ConfigError(
                    f"callbacks: {type(callback).__name__} is not supported with "
                    f"{setting('strategy', 'fsdp')}: torch cannot copy a sharded model; use ddp"
                )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the values before Lightning restores those of the checkpoint."""
        self._begin = values_of(trainer) | {"modes": modes_of(pl_module)}
        self._check_kinds()
        self._add_groups(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: Values
    ) -> None:
        """Keep the values with which the run began, and what was frozen or added since."""
        checkpoint["begin"] = self._begin
        checkpoint["modes"] = modes_of(pl_module)
        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        # Another callback may save before training begins, when nothing was added.
        known = self._begin.get("num_groups", [])
        checkpoint["added_groups"] = [
            [[names[p] for p in group["params"]] for group in optimizer.param_groups[num_groups:]]
            for optimizer, num_groups in zip(trainer.optimizers, known, strict=False)
        ]

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: Values
    ) -> None:
        """Keep the states of the schedules from Lightning, until all values are known."""
        if trainer.state.fn != "fit":
            return
        self._saved_begin = checkpoint.get("begin", {})
        self._schedules, checkpoint["lr_schedulers"] = checkpoint["lr_schedulers"], []
        self._modes = checkpoint.get("modes", {})
        self._added = checkpoint.get("added_groups", [])
        self._check_kinds()
        if self._begin:  # some strategies load the checkpoint late
            self._add_groups(trainer, pl_module)
        for stopping in callbacks_of(trainer, EarlyStopping):
            if state := checkpoint["callbacks"].get(stopping.state_key):
                state["patience"] = stopping.patience  # Lightning would restore the old one

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the schedules, and give both what has changed."""
        old, new = self._saved_begin, self._begin
        if old:
            groups = [
                group
                for optimizer, num_groups in zip(trainer.optimizers, new["num_groups"], strict=True)
                for group in optimizer.param_groups[:num_groups]
            ]
            for group, before, after in zip(groups, old["groups"], new["groups"], strict=True):
                group.update(merge(group, before, after), lr=scaled_lr(group, before, after))
        for index, config in enumerate(trainer.lr_scheduler_configs[: len(self._schedules)]):
            state = self._schedules[index]
            if old:
                state = merge(state, old["schedules"][index], new["schedules"][index])
            config.scheduler.load_state_dict(state)
        self._schedules = []
        if self._modes and old.get("modes") == new["modes"]:
            set_modes(pl_module, self._modes)

    def _add_groups(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the optimizers the groups that they got before, so that their state fits."""
        parameters = dict(pl_module.named_parameters())
        for optimizer, groups in zip(trainer.optimizers, self._added, strict=False):
            for names in groups:
                optimizer.add_param_group({"params": [parameters[name] for name in names]})
        self._added = []

    def _check_kinds(self) -> None:
        """Refuse the state of another kind of optimizer or schedule, before it is restored."""
        old, new = self._saved_begin.get("kinds"), self._begin.get("kinds")
        if old is None or new is None or old == new:
            return
        raise ConfigError(
            f"the run cannot continue with {', '.join(new)}: its checkpoint has "
            f"{', '.join(old)}. Restore the old values, or start over under another RUN_ID"
        )


def values_of(trainer: L.Trainer) -> Values:
    """The kinds and the values of all optimizers and schedules."""
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    kinds = []
    for optimizer in trainer.optimizers:
        # Such as "AdamW of 4 + 3 tensors".
        sizes = " + ".join(str(len(group["params"])) for group in optimizer.param_groups)
        kinds.append(f"{type(optimizer).__name__} of {sizes} tensors")
    return {
        "kinds": [*kinds, *(type(schedule).__name__ for schedule in schedules)],
        "num_groups": [len(optimizer.param_groups) for optimizer in trainer.optimizers],
        "groups": [deepcopy({k: v for k, v in g.items() if k != "params"}) for g in groups],
        "schedules": [deepcopy(schedule.state_dict()) for schedule in schedules],
    }


def modes_of(module: nn.Module) -> Values:
    """What is frozen: parameters, modules that are not in training mode, statistics."""
    modules = dict(module.named_modules())
    return {
        "frozen": [name for name, p in module.named_parameters() if not p.requires_grad],
        "evaluating": [name for name, part in modules.items() if not part.training],
        "untracked": [name for name, part in modules.items() if not getattr(part, TRACKS, True)],
    }


def set_modes(module: nn.Module, modes: Values) -> None:
    """Freeze what ``modes_of`` has found, and nothing else."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad == (name in modes["frozen"]):
            parameter.requires_grad_(name not in modes["frozen"])
    for name, part in module.named_modules():
        part.training = name not in modes["evaluating"]
        if hasattr(part, TRACKS):
            setattr(part, TRACKS, name not in modes["untracked"])


def merge(saved: Values, before: Values, after: Values) -> Values:
    """The saved values, less those that begin differently ``after`` than ``before``."""
    merged: Values = {}
    for name, value in saved.items():
        old: Any = before.get(name)
        new: Any = after.get(name)
        if old == new:
            merged[name] = value
        elif all(map(is_list_of_values, (value, old, new))) and len(value) == len(old) == len(new):
            # A schedule made of schedules.
            merged[name] = [merge(*each) for each in zip(value, old, new, strict=True)]
        else:
            merged[name] = new
    return merged


def is_list_of_values(value: Any) -> bool:
    """Whether it is a list of the states of schedules."""
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def scaled_lr(saved: Values, before: Values, after: Values) -> Any:
    """The saved learning rate, scaled as the configuration has scaled that of the beginning."""
    name = "initial_lr" if "initial_lr" in before and "initial_lr" in after else "lr"
    if before[name] == after[name] or not before[name]:
        return saved["lr"]
    return saved["lr"] * after[name] / before[name]
