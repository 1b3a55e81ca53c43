"""``samestep.patch_lightning``: libraries that build the Trainer themselves get ours.

A library may have imported the name ``Trainer`` long ago, or subclassed it, so no name is replaced:
the constructor of ``lightning.Trainer`` is. It gives the new object a class of ours, and Python
finds our methods from then on. ``isinstance``, subclasses and signatures stay what they are.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import lightning as L

from samestep.arguments import as_list
from samestep.errors import ConfigError
from samestep.lightning_names import SAME
from samestep.ranks import environment
from samestep.trainer import Trainer

ADDED = "callbacks", "plugins"
"""Arguments that the library and the user may both give: both count."""


class LibraryTrainer(Trainer):
    """Our Trainer for a library, which goes on with the module that it has given to ``fit``."""

    def _find_checkpoint(self, asked: str | None, model: L.LightningModule) -> str | None:
        """Lightning's rule: a module that is given is evaluated with the weights that it has."""
        if asked is None and self._is_given:
            return None
        return Trainer._find_checkpoint(self, asked, model)


class LightningPatch(AbstractContextManager["LightningPatch"]):
    """What ``patch_lightning`` returns: in effect until ``undo``, or until its block ends."""

    def __init__(self, run_dir: Path, options: Mapping[str, Any]) -> None:
        self.run_dir = run_dir
        self.num_trainers = 0
        """How many Trainers were built so far."""
        self._options = dict(options)
        self._replaced: Callable[..., None] = L.Trainer.__init__

        # Wrapped, as many libraries ask for the signature of the constructor.
        @functools.wraps(self._replaced)
        def build(trainer: L.Trainer, *args: Any, **given: Any) -> None:
            # A Trainer of ours calls the constructor of its parent.
            if isinstance(trainer, Trainer):
                self._replaced(trainer, *args, **given)
            else:
                self._build(trainer, *args, **given)

        L.Trainer.__init__ = build  # type: ignore[method-assign, assignment]

    def _build(self, trainer: L.Trainer, *args: Any, **given: Any) -> None:
        """Make a Trainer of Lightning one of ours, with the arguments of the library and ours."""
        self.num_trainers += 1
        trainer.__class__ = kind_of(type(trainer))  # type: ignore[arg-type]
        options = {**given, **self._options}
        for name in ADDED:
            options[name] = as_list(given.get(name)) + as_list(self._options.get(name))
        run_dir = self.run_dir / str(self.num_trainers)
        Trainer.__init__(trainer, *args, run_dir=run_dir, **options)  # type: ignore[arg-type]

    def undo(self) -> None:
        """Let Lightning build its own Trainer again. Trainers of ours remain what they are."""
        L.Trainer.__init__ = self._replaced  # type: ignore[method-assign]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Undo it at the end of the block."""
        self.undo()


def patch_lightning(*, run_dir: str | Path, **options: Any) -> LightningPatch:
    """Make each ``lightning.Trainer`` that a library builds from now on a Trainer of ours.

    The first one trains in ``run_dir/1``, the second one in ``run_dir/2``. So a program that starts
    again must build them in the same order: what is finished is left alone and its module gets
    the final weights, and the others continue.

    As one line it counts for the rest of the program, as a context manager for its block::

        with samestep.patch_lightning(run_dir="runs/sales"):
            forecast.fit(data)

    Args:
        run_dir: directory of the runs.
        options: arguments of ``samestep.Trainer``, which count more than those of the library.
            ``callbacks`` and ``plugins`` are added to those of the library.

    Raises:
        ConfigError: if ``pytorch_lightning`` was imported before Samestep.
    """
    check_names()
    # Fixed here, as a library may change the directory before it builds its Trainer.
    place = Path(environment.expand_home(str(run_dir), "run_dir")).absolute()
    return LightningPatch(place, options)


def check_names() -> None:
    """Raise a ConfigError if Lightning was imported under its older name before Samestep."""
    for older, name in SAME.items():
        if older in sys.modules and sys.modules[older] is not sys.modules.get(name):
            raise ConfigError(
                f"patch_lightning: {older} was imported before samestep, and is a second Lightning "
                "with a Trainer of its own; write `import samestep` above the other imports"
            )


@functools.cache
def kind_of(kind: type[L.Trainer]) -> type[LibraryTrainer]:
    """The class that a Trainer of this class gets: where it calls ``super()``, ours comes next."""
    if kind is L.Trainer:
        return LibraryTrainer
    return type(kind.__name__, (kind, LibraryTrainer), {"__module__": kind.__module__})
