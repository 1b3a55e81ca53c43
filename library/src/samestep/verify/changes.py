"""What ``samestep.Trainer`` changes in its arguments where ``samestep verify`` has started it."""

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L

from samestep.arguments import as_list
from samestep.plugin import Given
from samestep.run.copies import KeepsCopy
from samestep.run_spec import no_report
from samestep.verify import plan as plans
from samestep.verify.plan import NUM_EPOCHS
from samestep.verify.recorder import Recorder


def change(given: Given) -> Given:
    """The arguments with which an experiment runs; this module is a plug-in of its program."""
    plan = plans.read()
    callbacks = []
    for callback in as_list(given.callbacks):
        # An experiment must not overwrite a copy of the user's run, nor continue from it.
        if not isinstance(callback, KeepsCopy):
            callbacks.append(callback)
    # Its name stays: a command that names each start differently never continues, and must not seem
    # to.
    run_dir = Path(plan.run_root, given.run_dir.absolute().name)
    move_paths(callbacks, given.run_dir, run_dir)
    run = given.run
    if run is not None:
        run = replace(run, make_loggers=None, report=no_report)
    options = dict(given.options)
    if plan.num_steps is not None:
        options |= limits_of(options, plan.num_steps, plan.num_evaluated)
    # Otherwise three ranks and more add in an order that depends on the moment.
    if plan.adds_in_order:
        options["deterministic"] = True
    if plan.precision is not None:
        options["precision"] = plan.precision
    # The table shows what is announced, also where the user knows it.
    where = plan.accelerator, plan.devices, 1
    return Given(run_dir, run, *where, [*callbacks, Recorder(plan)], None, (), options)


def move_paths(callbacks: list[L.Callback], old: Path, new: Path) -> None:
    """Let callbacks that write below the old run directory write below the new one."""
    for callback in callbacks:
        for name, value in vars(callback).items():
            # A text without a separator is a name or a mode, and no path.
            if not isinstance(value, (str, Path)) or os.sep not in str(value):
                continue
            if Path(value).absolute().is_relative_to(old.absolute()):
                moved = new / Path(value).absolute().relative_to(old.absolute())
                setattr(callback, name, type(value)(moved))


def limits_of(
    options: Mapping[str, Any], num_steps: int, num_evaluated: int | None
) -> dict[str, Any]:
    """The arguments of Lightning that make a run short: few batches, in several epochs."""
    accumulates = options.get("accumulate_grad_batches") or 1
    num_batches = math.ceil(num_steps / NUM_EPOCHS) * accumulates
    asked = options.get("limit_train_batches")
    is_fewer = isinstance(asked, int) and asked < num_batches
    limits: dict[str, Any] = {
        "max_epochs": NUM_EPOCHS,
        "min_epochs": None,
        "min_steps": None,
        "max_time": None,
        "fast_dev_run": False,
        "log_every_n_steps": 1,
        "limit_train_batches": asked if is_fewer else num_batches,
    }
    # A schedule may be computed from it, so it stays a number where it is one.
    max_steps = options.get("max_steps", -1)
    if max_steps != -1:
        limits["max_steps"] = min(max_steps, num_steps)
    for name in ("limit_val_batches", "limit_test_batches"):
        # 0 switches the stage off.
        if options.get(name) != 0:
            limits[name] = num_evaluated
    # Lightning rejects an interval that is longer than the epoch.
    interval = options.get("val_check_interval")
    if isinstance(interval, int) and interval > limits["limit_train_batches"]:
        limits |= {"val_check_interval": None, "check_val_every_n_epoch": 1}
    every_epochs = options.get("check_val_every_n_epoch")
    if every_epochs is not None and every_epochs > NUM_EPOCHS:
        limits["check_val_every_n_epoch"] = 1
    return limits
