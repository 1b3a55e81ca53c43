"""What a run that resumes begins with: values of its new configuration, and what it has grown."""

from collections.abc import Iterable
from contextlib import suppress
from copy import deepcopy
from itertools import chain, zip_longest
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn

from samestep.callbacks.notes import join_names, print_note
from samestep.callbacks.run_state import Part, Saved
from samestep.errors import ConfigError
from samestep.ranks.compat import callbacks_of
from samestep.run.weights import GROWN, find_growth, read_shapes

Values = dict[str, Any]
Kind = list[str]
"""Of a schedule its class; of an optimizer its groups: ``SGD of 4 tensors, SGD of 1 tensors``."""

HIDDEN = ""
"""The name of a parameter that the module does not register."""
TRACKS = "track_running_stats"  # of batch norm; BaseFinetuning sets it


class HparamsOnResume(Part):
    """Gives a run that resumes the values of its new configuration: learning rate, length...

    A checkpoint holds the values of optimizers and schedules, and Lightning restores them all. So
    neither another learning rate nor another length of the run would have an effect: a one-cycle
    schedule would even end with an error after its old number of steps. Therefore a checkpoint
    also keeps the values with which the run began. If a value begins differently now, the new
    configuration has changed it, and the new value counts. All other values are restored: momentum,
    the position of a schedule.

    Parameters may be frozen, unfrozen or given to an optimizer in a new group while the
    run trains, as callbacks for fine-tuning do, and tensors may grow. A checkpoint keeps that too.
    New layers or another optimizer only the program can make: a note at the first save says so.

    A changed learning rate is scaled to the position of the schedule. The first step still takes
    the position of the checkpoint, and the schedule sets the rate of the second one.
    """

    key = "begin"

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._begin: Values = {}
        """With which values optimizers and schedules begin, by this configuration."""
        self._saved_begin: Values = {}
        """The same in the checkpoint from which the run resumes."""
        self._shapes: Values = {}
        """The shapes of all tensors of the model, when it begins."""
        self._is_noted = False  # that only the program can make what it saves
        self._schedules: list[Values] = []
        """The states of the schedules in that checkpoint."""
        self._modes: Values = {}
        """Which parameters were frozen in that checkpoint."""
        self._added: list[list[list[str]]] = []
        """The groups that each optimizer got before that checkpoint: the names of parameters."""
        self._saved_kinds: list[Kind] | None = None
        """The optimizers and schedules in that checkpoint."""
        self._grown: Values = {}
        """The tensors that had grown before that checkpoint."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Forget an earlier ``fit``."""
        # A second `fit` begins with new optimizers, and must not compare them with those of a
        # checkpoint that the first one has read.
        if stage == "fit":
            self._reset()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the first values, before Lightning restores the saved ones."""
        self._begin = read_values(trainer)
        self._begin["modes"] = read_modes(pl_module)
        self._shapes = read_shapes(pl_module)
        self._match_optimizers(trainer, pl_module)

    def save(self, trainer: L.Trainer, checkpoint: Values) -> Values | None:
        """Keep the values with which the run began, and what was frozen or added since."""
        # Another callback may save before training begins, when nothing was added.
        if not self._begin:
            return None
        module = trainer.lightning_module
        kinds, first = read_kinds(trainer), self._begin["kinds"]
        added = self._read_added(trainer, module)
        checkpoint[GROWN], changes = find_growth(module, self._shapes | self._grown)
        if not begins_as(kinds, first):
            changes.append(f"{describe(kinds)} has replaced {describe(first)}")
        if HIDDEN in chain(*chain(*added)):
            changes.append("an optimizer has got parameters that are not in the module")
        self._note(trainer, changes)
        modes = read_modes(module)
        return {"begin": self._begin, "modes": modes, "kinds": kinds, "added_groups": added}

    def _read_added(self, trainer: L.Trainer, pl_module: L.LightningModule) -> list[Any]:
        """The names of the parameters in the groups that each optimizer got since it began."""
        # By names: another process has other parameters, and a new group may change their order.
        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        added = []
        for optimizer, first in zip(trainer.optimizers, self._begin["groups"], strict=False):
            groups = []
            for group in optimizer.param_groups[len(first) :]:
                groups.append([names.get(parameter, HIDDEN) for parameter in group["params"]])
            added.append(groups)
        return added

    def _note(self, trainer: L.Trainer, changes: list[str]) -> None:
        """Say once what a later start must make itself, or else it cannot load what is saved."""
        if changes and not self._is_noted:
            self._is_noted = True
            print_note(
                trainer,
                f"Note: since training began {join_names(changes)}. A later start can continue "
                "only if __init__, configure_optimizers or on_load_checkpoint make the same",
            )

    def load(self, trainer: L.Trainer, checkpoint: Values, saved: Saved) -> None:
        """Keep the states of the schedules from Lightning, until all values are known."""
        self._saved_begin, self._modes = saved.own["begin"], saved.own["modes"]
        self._added, self._saved_kinds = saved.own["added_groups"], saved.own["kinds"]
        self._schedules = checkpoint["lr_schedulers"]
        checkpoint["lr_schedulers"] = []
        self._grown = checkpoint.get(GROWN, {})
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
        before, after = self._saved_begin, self._begin
        # Values of another optimizer than the one with which the run began say nothing: the program
        # has made one that was exchanged while it trained.
        if not begins_as(after["kinds"], before["kinds"]):
            before = after
        self._update_groups(trainer, before["groups"], after["groups"])
        self._update_schedules(trainer, before["schedules"], after["schedules"])
        # If the module begins with other parameters frozen now, its new choice counts.
        if self._saved_begin["modes"] == self._begin["modes"]:
            set_modes(pl_module, self._modes)

    def _update_groups(self, trainer: L.Trainer, before: list[Any], after: list[Any]) -> None:
        """Set what the configuration has changed in the groups of the optimizers."""
        for optimizer, olds, news in zip(trainer.optimizers, before, after, strict=True):
            # Groups that were added while the run trained have no first values.
            for group, old, new in zip(optimizer.param_groups, olds, news, strict=False):
                lr = scaled_lr(group, old, new)
                group.update(merge(group, old, new))
                group["lr"] = lr

    def _update_schedules(self, trainer: L.Trainer, before: list[Any], after: list[Any]) -> None:
        """Restore the schedules, except what the configuration has changed in them."""
        states = map(merge, self._schedules, before, after)
        for config, state in zip(trainer.lr_scheduler_configs, states, strict=False):
            config.scheduler.load_state_dict(state)
        self._schedules = []

    def _match_optimizers(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the optimizers the groups that they got before, so that their state fits.

        Raises:
            ConfigError: if it does not: they are of another kind, or have other groups.
        """
        parameters = dict(pl_module.named_parameters())
        firsts = self._saved_begin.get("groups", [])
        for optimizer, first, added in zip(trainer.optimizers, firsts, self._added, strict=False):
            # The program may have made some of them itself.
            for names in added[len(optimizer.param_groups) - len(first) :]:
                # Of parameters that are not in the module only the program can make a group.
                with suppress(KeyError):
                    optimizer.add_param_group({"params": [parameters[name] for name in names]})
        now, saved = read_kinds(trainer), self._saved_kinds
        if saved not in (None, now):
            raise ConfigError(
                f"the run cannot continue with {describe(now)}: its checkpoint has "
                f"{describe(saved)}. Restore the old values, or start a new run"
            )


def read_values(trainer: L.Trainer) -> Values:
    """The kinds and the values of all optimizers and schedules."""
    groups: list[list[Values]] = []
    for optimizer in trainer.optimizers:
        groups.append([])
        for group in optimizer.param_groups:
            values = dict(group)
            del values["params"]
            # A learning rate may be a tensor, which is changed in place.
            groups[-1].append(deepcopy(values))
    schedules: list[Values] = []
    for config in trainer.lr_scheduler_configs:
        schedules.append(deepcopy(config.scheduler.state_dict()))
    return {"kinds": read_kinds(trainer), "groups": groups, "schedules": schedules}


def read_kinds(trainer: L.Trainer) -> list[Kind]:
    """The kinds of all optimizers and schedules."""
    kinds: list[Kind] = []
    for optimizer in trainer.optimizers:
        name = type(optimizer).__name__
        kinds.append(
            [f"{name} of {len(group['params'])} tensors" for group in optimizer.param_groups]
        )
    return kinds + [[type(config.scheduler).__name__] for config in trainer.lr_scheduler_configs]


def begins_as(kinds: list[Kind], first: list[Kind]) -> bool:
    """Whether these kinds are the first ones, but for groups that were added."""
    none: Kind = []
    return [kind[: len(old)] for kind, old in zip_longest(kinds, first, fillvalue=none)] == first


def describe(kinds: list[Kind]) -> str:
    """The kinds in a sentence."""
    return ", ".join(map(" + ".join, kinds)) or "no optimizer"


def read_modes(module: nn.Module) -> Values:
    """What is frozen: parameters, modules that are not in training mode, statistics."""
    return {
        "frozen": names_without(module.named_parameters(), "requires_grad"),
        "evaluating": names_without(module.named_modules(), "training"),
        "untracked": names_without(module.named_modules(), TRACKS),
    }


def names_without(parts: Iterable[tuple[str, Any]], attribute: str) -> list[str]:
    """The names of the parts whose attribute is false."""
    return [name for name, part in parts if not getattr(part, attribute, True)]


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
    old, new = before.get("initial_lr", before["lr"]), after.get("initial_lr", after["lr"])
    # Zero cannot be scaled.
    if old in (0, new):
        return saved["lr"]
    return saved["lr"] * new / old
