"""Every style of the matrix, in the order of the table."""

from . import batches, callbacks, libraries, loaders, logs, models, optimizers, schedules, state
from .base import LOADER, Style

STYLES: list[Style] = [
    *loaders.STYLES, *batches.STYLES, *models.STYLES, *optimizers.STYLES, *schedules.STYLES,
    *callbacks.STYLES, *logs.STYLES, *state.STYLES, *libraries.STYLES,
]  # fmt: skip
STYLES += [
    style._replace(
        name=f"{style.name}, split_batches",
        overrides=(*style.overrides, "trainer.split_batches=true"),
        told=(),
    )
    for style in STYLES
    if style.told == LOADER
]
