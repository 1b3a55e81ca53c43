"""Gradients that a module with manual optimization has accumulated, when a run stops."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import TensorDataset

from samestep.callbacks.exact import RankState
from samestep.data.loader import BatchLoader
from tests.samestep.callbacks.interrupted import Learner, check_exact, fit

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")


class Manual(Learner):
    """Steps after every third batch, also over the end of an epoch, as Lightning's docs show."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.unused = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch, batch_idx) / 3)
        if (self.trainer.fit_loop.total_batch_idx + 1) % 3 == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()


def test_accumulated_gradients_survive_a_stop(tmp_path: Path):
    def batches() -> BatchLoader:
        return BatchLoader(TensorDataset(torch.arange(20.0)[:, None]), 2, shuffle=True)

    def callbacks() -> list:
        return [RankState()]

    # Each is one batch or two after an optimizer step.
    stops = [(0, 3), (0, 6), (1, 2), (1, 5)]
    options = {"model": Manual, "limit_val_batches": 0}
    whole, _ = check_exact(tmp_path, batches, *stops, callbacks=callbacks, **options)
    # The checkpoint of the first epoch's end comes one batch after a step, too.
    for epochs in (1, 2):
        options["max_epochs"] = epochs
        (part,) = fit(tmp_path / "parts", batches, callbacks=callbacks, **options)
    assert torch.equal(part.layer.weight, whole.layer.weight)


def test_on_another_number_of_ranks_the_mean_goes_on():
    module, ranks = Manual(), RankState()
    trainer = L.Trainer(accelerator="cpu", logger=False)
    trainer.state.fn = "fit"
    saved = [
        {"weight": 1.0, "sums": {}, "gradients": {"layer.weight": torch.tensor([[1.0]])}},
        {"weight": 1.0, "sums": {}, "gradients": {"layer.weight": torch.tensor([[3.0]])}},
        {"weight": 1.0, "sums": {}, "gradients": {}},
    ]
    ranks.on_load_checkpoint(trainer, module, {"state_of_ranks": saved[:2]})
    ranks.on_train_start(trainer, module)
    assert module.layer.weight.grad.tolist() == [[2.0]]
    assert module.unused.weight.grad is None
    ranks.on_load_checkpoint(trainer, module, {"state_of_ranks": saved})
    ranks.on_train_start(trainer, module)
    assert module.layer.weight.grad.item() == pytest.approx(4 / 3)
