"""Every style of the matrix, in the order of the table."""

from . import batches, callbacks, loaders, logs, models, optimizers, schedules, state
from .base import Style

STYLES: list[Style] = [
    *loaders.STYLES, *batches.STYLES, *models.STYLES, *optimizers.STYLES, *schedules.STYLES,
    *callbacks.STYLES, *logs.STYLES, *state.STYLES,
]  # fmt: skip
