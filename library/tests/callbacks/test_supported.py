from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks.spike import SpikeDetection

from library.tests.kit import Net, fit
from samestep.callbacks.supported import UNSUPPORTED, check_supported
from samestep.errors import ConfigError


class FindsAtSomeEpochs(LearningRateFinder):
    """As in Lightning's documentation: a child is not supported either."""


@pytest.mark.parametrize(
    ("callback", "remedy"),
    [
        (FindsAtSomeEpochs(), "set it in the configuration of the model"),
        (BatchSizeFinder(), "set it in the configuration of the data"),
        (StochasticWeightAveraging(swa_lrs=0.1), "use .*EMAWeightAveraging"),
        (ModelPruning("l1_unstructured"), "prune the weights of a finished run"),
        (OnExceptionCheckpoint("."), "callbacks.checkpoints saves"),
        (SpikeDetection(), "callbacks.loss_guard"),
    ],
    ids=[kind.__name__ for kind in UNSUPPORTED],
)
def test_callbacks_that_cannot_continue_are_rejected(callback: L.Callback, remedy: str):
    with pytest.raises(ConfigError, match=f"callbacks.mine: .*is not supported: .*{remedy}"):
        check_supported(callback, "callbacks.mine")


def test_those_of_the_module_are_rejected_before_the_first_step(tmp_path: Path):
    class Brings(Net):
        def configure_callbacks(self):
            return [OnExceptionCheckpoint(tmp_path / "own")]

    with pytest.raises(ConfigError, match=r"Brings\.configure_callbacks: OnExceptionCheckpoint is"):
        fit(tmp_path / "run", Brings)
    assert not (tmp_path / "run").exists()
