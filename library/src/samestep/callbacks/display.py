"""What the Trainer must know of a callback that shows progress: that it does."""

import lightning as L


class ShowsProgress(L.Callback):
    """A callback that shows the progress of training, so that no bar of Lightning is needed."""
