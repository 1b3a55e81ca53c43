"""Train and test one model."""

from collections.abc import Sequence

from omegaconf import DictConfig


def train(cfg: DictConfig, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Fit the model that ``cfg`` describes, and test its best checkpoint.

    A run whose directory holds a checkpoint continues from it; a finished one is left alone.

    Returns:
        The final metrics, as in ``metrics.json``; nothing on ranks other than zero.
    """
    # Imported here: torch takes seconds, and help and errors answer before.
    from samestep import build_run

    trainer, model, data = build_run(cfg, overrides)
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)
    return trainer.results
