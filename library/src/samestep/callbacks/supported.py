"""Lightning's callbacks that cannot keep the promises of a run, and what takes their place."""

import lightning as L
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks.spike import SpikeDetection

from samestep.errors import ConfigError

UNSUPPORTED: dict[type[L.Callback], str] = {
    LearningRateFinder: "it trains before the run begins, and again each time the run continues; "
    "find the rate in a script of your own, and set it in the configuration of the model",
    BatchSizeFinder: "it trains before the run begins, and again each time the run continues; "
    "find the size in a script of your own, and set it in the configuration of the data",
    StochasticWeightAveraging: "no checkpoint holds its averaged weights, so they are not tested; "
    "use lightning.pytorch.callbacks.WeightAveraging or EMAWeightAveraging",
    ModelPruning: "a checkpoint of a pruned model cannot be continued; prune the weights of a "
    "finished run",
    OnExceptionCheckpoint: "Lightning would begin the next run from its file; "
    "callbacks.checkpoints saves what is needed to continue",
    SpikeDetection: "its state cannot be saved (Lightning 2.6); callbacks.loss_guard watches "
    "the gradients",
}


def check_supported(callback: L.Callback, name: str) -> None:
    """Reject a callback with which a run could not be continued exactly; ``name`` is its place."""
    for kind, why in UNSUPPORTED.items():
        if isinstance(callback, kind):
            raise ConfigError(f"{name}: {kind.__name__} is not supported: {why}")
