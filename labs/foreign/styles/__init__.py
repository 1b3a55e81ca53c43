"""Every style, in the order of the table; those of libraries have none."""

from . import batches, callbacks, libraries, loaders, logs, models, optimizers, schedules, state
from .base import LOADER, Style


def with_split_batches(styles: list[Style]) -> list[Style]:
    """The styles; those of which only the DataLoader differs on ranks also with split_batches."""
    split = []
    for style in styles:
        if style.told == LOADER:
            name = f"{style.name}, split_batches"
            overrides = (*style.overrides, "trainer.split_batches=true")
            split.append(style._replace(name=name, overrides=overrides, told=()))
    return [*styles, *split]


STYLES = with_split_batches([
    *loaders.STYLES, *batches.STYLES, *models.STYLES, *optimizers.STYLES, *schedules.STYLES,
    *callbacks.STYLES, *logs.STYLES, *state.STYLES,
])  # fmt: skip
OF_LIBRARIES = with_split_batches(libraries.STYLES)
