"""Some samples of batches of any kind."""

import numpy as np
import pytest
import torch
from torch import Tensor

from samestep.plugins import samples
from samestep.plugins.samples import CannotSplit


class Graph:
    """A batch with attributes, as of torch_geometric."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.name = x, "graph"


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.arange(4), torch.arange(2)),
        ([torch.arange(4), torch.tensor(7)], [torch.arange(2), torch.tensor(7)]),
        ({"x": torch.arange(4), "names": ["a", "b", "c", "d"], "n": 3},
         {"x": torch.arange(2), "names": ["a", "b"], "n": 3}),
        ([torch.ones(1), torch.ones(2), torch.ones(3), torch.ones(5)],
         [torch.ones(1), torch.ones(2)]),
        (np.arange(4), np.arange(2)),
    ],
)  # fmt: skip
def test_samples_of_a_batch_of_any_kind(batch, expected):
    assert str(samples.take(batch, 4, slice(0, 2))) == str(expected)


def test_samples_of_an_object():
    taken = samples.take(Graph(torch.arange(4)), 4, slice(2, 4))
    assert taken.x.tolist() == [2, 3]
    joined = samples.join([taken, Graph(torch.arange(2))])
    assert joined.x.tolist() == [2, 3, 0, 1]


@pytest.mark.parametrize("batch", [torch.ones(5), [torch.ones(4), torch.ones(9)]])
def test_a_batch_that_is_not_made_of_samples_cannot_be_split(batch):
    with pytest.raises(CannotSplit, match="in a batch of 4 samples"):
        samples.take(batch, 4, slice(0, 2))
