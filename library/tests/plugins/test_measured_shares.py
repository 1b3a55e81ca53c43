"""Who measures the speeds of the ranks; what they make of them: callbacks/test_slice_weighting."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from library.tests.kit import Net, fit, on_ranks
from samestep import BatchLoader
from samestep.ranks import environment


class OnPairs(Net):
    def loss(self, batch):
        return super().loss(batch[0])


def pairs() -> BatchLoader:
    samples = torch.arange(16.0)[:, None]
    return BatchLoader(TensorDataset(samples, samples), 4)


def train_on_ranks(folder: str) -> None:
    asked = "auto" if environment.rank() == 0 else "equal"
    fit(Path(folder), OnPairs, pairs, max_epochs=1, shares=asked, timeout_s=20)


@pytest.mark.program
def test_all_ranks_measure_if_the_command_of_rank_zero_says_so(tmp_path: Path):
    done = on_ranks(train_on_ranks, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/metrics.json").exists()
