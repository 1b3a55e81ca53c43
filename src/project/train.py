"""Train and test one model."""

from collections.abc import Sequence

from omegaconf import DictConfig


def train(cfg: DictConfig, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Fit the model that ``cfg`` describes, or continue, and test its best checkpoint.

    Returns the final metrics, as in ``metrics.json``; nothing on ranks other than zero.
    """
    from samestep import build_run  # imports torch, which takes seconds: errors answer before

    trainer, model, data = build_run(cfg, overrides)
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)
    return trainer.results
