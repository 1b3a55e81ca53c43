"""Gradients that are accumulated, by Lightning or by a module of its own, when a run stops."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from library.tests.kit import Net, batches, check_exact, check_same, fit
from samestep.callbacks.rank_state import RankState
from samestep.callbacks.run_state import Saved


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")
def test_a_run_stops_after_a_whole_optimizer_step(tmp_path: Path):
    """On two ranks: test_two_ranks.py."""

    def data() -> Any:
        return batches(20, 2)  # which does not know that its batches are accumulated

    # An epoch has the steps 0-2, 3-5, 6-8 and 9, the last one of a single batch.
    stops: Any = [(0, 0), (0, 4), (0, 8), (0, 9), (1, 4), (1, 6)]
    _, parts = check_exact(tmp_path / "fixed", Net, data, *stops, accumulate_grad_batches=3)
    assert [len(part.seen) for part in parts] == [3, 3, 3, 1, 6, 3, 1]

    def schedule() -> list[L.Callback]:
        return [GradientAccumulationScheduler({0: 2, 1: 4})]

    stops = [(0, 2), (1, 0), (1, 4)]
    _, parts = check_exact(tmp_path / "scheduled", Net, data, *stops, callbacks=schedule)
    assert [len(part.seen) for part in parts] == [4, 10, 4, 2]


class Manual(Net):
    """Steps after every third batch, also over the end of an epoch, as Lightning's docs show."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.unused = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch) / 3)
        if (self.trainer.fit_loop.total_batch_idx + 1) % 3 == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()


def test_accumulated_gradients_survive_a_stop(tmp_path: Path):
    def data() -> Any:
        return batches(20, 2)

    # Each is one batch or two after an optimizer step.
    check_exact(tmp_path, Manual, data, (0, 3), (0, 6), (1, 2), (1, 5))
    # The checkpoint of the first epoch's end comes one batch after a step, too.
    for epochs in (1, 2):
        fit(tmp_path / "longer", Manual, data, max_epochs=epochs)
    check_same(tmp_path / "longer", tmp_path / "whole")


def test_on_another_number_of_ranks_the_mean_goes_on():
    module, ranks = Manual(), RankState()
    trainer: Any = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.state.fn = "fit"
    saved = [
        {"sums": {}, "gradients": {"head.bias": torch.tensor([1.0])}},
        {"sums": {}, "gradients": {"head.bias": torch.tensor([3.0])}},
    ]
    ranks.load(trainer, {}, Saved([saved[0]], [[state] for state in saved], is_same_number=False))
    ranks.begin(trainer, module)
    assert module.head.bias.grad.tolist() == [2.0]
    assert module.unused.weight.grad is None
