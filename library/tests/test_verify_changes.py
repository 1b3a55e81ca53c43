"""What an experiment of ``samestep verify`` changes in the arguments of a Trainer."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from samestep.callbacks.checkpoints import Checkpoints
from samestep.plugin import Given
from samestep.ranks import environment
from samestep.run.artifacts import Artifacts
from samestep.run_spec import RunSpec
from samestep.verify import changes
from samestep.verify.experiments import KILLED, STOPPED, STOPPED_WITHIN, Settings, choose_place
from samestep.verify.main import settings_of
from samestep.verify.plan import Plan
from samestep.verify.recorder import Recorder
from samestep.verify.records import Batch, Rank

PLAN = Plan(records="/scratch/records", run_root="/scratch/runs", num_steps=40, num_evaluated=4)


def apply(
    monkeypatch: pytest.MonkeyPatch, plan: Plan = PLAN, run_dir: str = "/volume/mine", **given
) -> Given:
    monkeypatch.setenv(environment.VERIFY, plan.to_json())
    options = given.pop("options", {})
    facts = {"run": None, "accelerator": "auto", "callbacks": None, "logger": True, "allow": ["x"]}
    facts |= {"devices": 4, "num_nodes": 2}
    return changes.change(Given(Path(run_dir), **facts | given, options=options))


def test_a_run_is_short_and_keeps_what_is_shorter(monkeypatch: pytest.MonkeyPatch):
    options = apply(monkeypatch, options={"max_epochs": 90, "max_time": "00:01:00:00"}).options
    assert (options["max_epochs"], options["max_time"]) == (3, None)
    # 40 steps in three epochs.
    assert options["limit_train_batches"] == 14
    assert (options["limit_val_batches"], options["limit_test_batches"]) == (4, 4)
    asked = {
        "accumulate_grad_batches": 2, "limit_train_batches": 10, "limit_val_batches": 0,
        "max_steps": 1000, "val_check_interval": 500, "check_val_every_n_epoch": None,
    }  # fmt: skip
    options = apply(monkeypatch, options=asked).options
    assert (options["limit_train_batches"], options["limit_val_batches"]) == (10, 0)
    assert options["max_steps"] == 40
    assert (options["val_check_interval"], options["check_val_every_n_epoch"]) == (None, 1)
    assert (
        apply(monkeypatch, options={"limit_train_batches": 0.5}).options["limit_train_batches"]
        == 14
    )
    # The laboratory has runs that are short anyway.
    assert apply(monkeypatch, replace(PLAN, num_steps=None), options=asked).options == asked


def test_nothing_reaches_the_run_its_copies_or_its_trackers(monkeypatch: pytest.MonkeyPatch):
    callbacks = [
        Checkpoints("/volume/mine/checkpoints", 300.0),
        ModelCheckpoint("/elsewhere/kept"),
        Artifacts("file:///store", "/volume/mine", 60.0),
    ]
    run = RunSpec("mine", Path("/volume/mine"), make_loggers=list, report=print)
    found = apply(monkeypatch, callbacks=callbacks, run=run)
    assert found.run_dir == Path("/scratch/runs/mine")
    checkpoints, kept, recorder = found.callbacks
    assert checkpoints.folder == Path("/scratch/runs/mine/checkpoints")
    assert kept.dirpath == "/elsewhere/kept"
    assert isinstance(recorder, Recorder)
    assert (found.logger, found.allow, found.run.make_loggers) == (None, (), None)
    assert found.run.report is not print


def test_several_ranks_are_compared_exactly(monkeypatch: pytest.MonkeyPatch):
    plan = replace(PLAN, devices=3, precision="64-true", adds_in_order=True)
    found = apply(monkeypatch, plan, options={"precision": "bf16-mixed", "deterministic": None})
    assert (found.options["precision"], found.options["deterministic"]) == ("64-true", True)
    assert (found.accelerator, found.devices, found.num_nodes) == ("cpu", 3, 1)


def settings_with(gpus: int | None) -> Settings:
    arguments = Namespace(ranks=2, steps=40, timeout_s=600, jobs=None, gpu=gpus is not None)
    return settings_of(arguments, ["python"], Path("/scratch"), gpus)


def test_a_machine_with_one_gpu_has_one_rank():
    assert (settings_with(None).accelerator, settings_with(None).ranks) == ("cpu", 2)
    for gpus, ranks in ((1, 1), (2, 2), (8, 2)):
        settings = settings_with(gpus)
        assert (settings.accelerator, settings.ranks, settings.jobs) == ("gpu", ranks, 1)


def rank_with(epochs: int, batches: int, accumulates: int) -> Rank:
    rank = Rank()
    for epoch in range(epochs):
        for number in range(batches):
            step = (epoch * batches + number) // accumulates
            rank.batches[epoch, number] = Batch(step, [], None, None)
    return rank


def test_a_run_is_harmed_in_the_middle_of_an_epoch_and_of_a_step():
    assert choose_place(STOPPED, rank_with(3, 9, 1)) == (1, 4)
    assert choose_place(STOPPED_WITHIN, rank_with(3, 9, 1)) is None
    assert choose_place(KILLED, rank_with(3, 9, 1)) == (2, 4)
    # Steps begin with batches 0, 3 and 6.
    assert choose_place(STOPPED, rank_with(3, 9, 3)) == (1, 3)
    assert choose_place(STOPPED_WITHIN, rank_with(3, 9, 3)) == (1, 5)
    assert choose_place(KILLED, rank_with(1, 1, 1)) == (0, 0)
