"""What a run asks of its trackers, and the tracker of a run without one.

The trackers themselves are in ``loggers``: a run gets them as objects.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger


class ResumedTracker:
    """A tracker that must know where a run begins or resumes."""

    def begin(self, step: int) -> None:
        """Continue at ``step``, as Lightning counts what it logs."""
        raise NotImplementedError


class NullObject:
    """Has every attribute and method, takes every argument, and does nothing."""

    def __getattr__(self, name: str) -> "NullObject":
        # copy and pickle ask for special methods, and would call them.
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "NullObject":  # noqa: D102
        return self

    __getitem__ = __enter__ = __call__

    def __setitem__(self, *args: object) -> None:
        pass

    __exit__ = __setitem__

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0


class NullLogger(Logger):
    """The ``self.logger`` of a module in a run without a tracker, and on ranks other than zero.

    ``self.logger.experiment.add_histogram(...)`` does nothing, and so does any other method of the
    logger and its experiment.
    """

    name = version = ""
    save_dir = root_dir = log_dir = ""  # the run directory
    experiment = NullObject()

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__()
        self.save_dir = self.root_dir = self.log_dir = str(run_dir)

    def __getattr__(self, name: str) -> NullObject:
        value: NullObject = getattr(self.experiment, name)
        return value

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: ``metrics.csv`` has them."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: ``config.yaml`` has them."""
