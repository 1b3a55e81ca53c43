from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

from library.tests.kit import Net, fit
from samestep.run.metrics import read_history


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_the_rate_is_the_one_with_which_the_step_was_taken(lr, tmp_path: Path):
    def halve(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=lr)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step"}]

    fit(tmp_path, lambda: Net(halve), max_steps=3)
    rows = read_history(tmp_path)
    rates = {row["step"]: row["step/lr"] for row in rows if "step/lr" in row}
    assert rates == {0: 0.5, 1: 0.25, 2: 0.125}
