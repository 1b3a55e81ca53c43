"""Keeps the Python objects that training changes, and names once those that it cannot keep."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import lightning as L
from torchmetrics import Metric

from samestep.callbacks.notes import join_names, print_note
from samestep.callbacks.run_state import Part, Saved
from samestep.data.loaders import find_loaders, without_states
from samestep.heap.heap import Heap, text_of
from samestep.heap.kinds import is_of_library
from samestep.ranks import compat
from samestep.ranks.strategies import class_of

TRAINING, VALIDATION = "training data", "validation data"
"""The first words of names of what only loaders hold."""
NUM_PROBED = 2  # epochs of this process in which reading is watched


class Objects(Part):
    """Keeps what the objects of the program hold, and names once what it cannot keep.

    A running mean as a float, the hidden state of a recurrent net, a replay buffer, a random
    generator, the rate of a Dropout, the indices of a Subset: whatever can be reached from the
    module, the user's callbacks, the DataModule, the optimizers or the loaders, and is another
    value than before the first step, is part of the checkpoint, for each rank its own. See
    ``samestep.heap``. On another number of ranks all ranks get the values of rank zero.

    It is given back when the loaders are made, of the first values as they were before, and are
    not read yet; and again after every ``on_train_start``, in which a module may give its
    attributes their first values.

    What reading a batch changes, such as a counter of a data set, is not kept: when a checkpoint
    is saved, it is ahead by the batch that comes next. If it matters, that batch is another one
    after the interruption, and ``DataResume`` says so.

    It must be the last callback, so that the others have changed what they change in a step.
    """

    key = "objects"

    def __init__(self) -> None:
        self.lost: list[str] = []
        """What cannot be kept, such as ``Model.loss_function``."""
        self._heap = Heap()
        self._is_training = False
        self._saved: Saved | None = None  # from a checkpoint
        self._unsaved_buffers: set[str] = set()
        self._before: dict[Any, Any] = {}  # what the objects held before what is watched now
        self._num_passes = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Note the buffers with ``persistent=False``, before a strategy shards the model."""
        saved = pl_module.state_dict()
        self._unsaved_buffers = {n for n, _ in pl_module.named_buffers() if n not in saved}
        self._heap = Heap()
        self._is_training, self._num_passes = False, 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Name the objects before training makes others."""
        self._name_objects(trainer)

    def place_data(self, trainer: L.Trainer) -> None:
        """Give back what all objects held, before the data are read."""
        self._name_objects(trainer)
        self._load(trainer)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the values before Lightning validates some batches."""
        self._name_objects(trainer)
        self._before = self._heap.marks()

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note what has changed: a run that resumes skips this validation."""
        self._heap.changed |= self._heap.changed_since(self._before)

    def begin(self, trainer: L.Trainer) -> None:
        """Note the first values, restore the saved ones, and print what is lost.

        ``samestep.loops`` calls it after every ``on_train_start``.
        """
        self._name_objects(trainer)
        self._heap.begin()
        self._is_training = True
        # A pass over the training data has begun.
        failed = self._load(trainer, without=TRAINING)
        name_in_note(
            trainer,
            "the checkpoint holds values of ",
            sorted(failed),
            " that cannot be restored in this program. The run continues with their first values",
        )
        if self._saved:
            name_in_note(
                trainer,
                "this run continues with the first values of these, because no checkpoint holds "
                "them: ",
                self.lost,
            )
        self._saved = None

    def begin_reading(self) -> None:
        """Note the values before a pass over the data begins, or its first batch is read."""
        if self._num_passes < NUM_PROBED:
            self._before = self._heap.marks()

    def end_reading(self, *, is_first_batch: bool) -> None:
        """Note what reading has changed."""
        if self._num_passes < NUM_PROBED:
            self._heap.passing |= self._heap.changed_since(self._before)
            self._num_passes += is_first_batch

    def suspects(self) -> list[str]:
        """The names of what may have changed the data, and is in no checkpoint."""
        return sorted({*map(text_of, self._heap.passing), *self.lost})

    def save(self, trainer: L.Trainer, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
        """Keep what has changed on this rank."""
        # Nothing is trained, or not yet: another callback may save before the first step.
        if not self._is_training:
            return None
        self._heap.hold([*self._find_held(trainer)])
        kept = self._heap.dump()
        new = sorted(self._heap.lost.difference(self.lost))
        self.lost += new
        name_in_note(
            trainer,
            "training changes these, and no checkpoint holds them: ",
            new,
            ". A run that resumes starts with their first values. A function, class or part of a "
            "net that is exchanged is kept if it can be imported by its name; other objects by "
            "samestep.register, or by state_dict of what holds them",
        )
        return kept

    def load(self, trainer: L.Trainer, checkpoint: dict[str, Any], saved: Saved) -> None:
        """Remember what was kept until the objects exist."""
        self._saved = saved

    def state_dict(self) -> dict[str, Any]:
        """What is lost."""
        return {"names": self.lost}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what is lost."""
        self.lost = list(state_dict["names"])

    def _load(self, trainer: L.Trainer, without: str | tuple[str, ...] = ()) -> set[str]:
        """Give back what was held, but to objects of a name; the names of what cannot have it."""
        if self._saved is None:
            return set()
        device = trainer.lightning_module.device
        return self._heap.load(
            self._saved.own, device, lambda name, _: not name.startswith(without)
        )

    def _name_objects(self, trainer: L.Trainer) -> None:
        self._heap.name_objects(dict(find_roots(trainer)), [*self._find_held(trainer)])

    def _find_held(self, trainer: L.Trainer) -> Iterator[Any]:
        """What a checkpoint holds anyway: weights, buffers, optimizers, schedules, metrics."""
        module = trainer.lightning_module
        yield from module.parameters()
        for name, buffer in module.named_buffers():
            if name not in self._unsaved_buffers:
                yield buffer
        yield from (part for part in module.modules() if isinstance(part, Metric))
        yield from trainer.optimizers
        yield from (config.scheduler for config in trainer.lr_scheduler_configs)


def find_roots(trainer: L.Trainer) -> Iterator[tuple[str, Any]]:
    """From where the objects of a program can be reached, by names."""
    module = trainer.lightning_module
    yield class_of(module).__name__, module
    numbers = Counter([class_of(module).__name__])
    for callback in compat.callbacks_of(trainer, L.Callback):
        name = type(callback).__name__
        numbers[name] += 1
        if not is_of_library(type(callback)):
            # Those of one class are numbered, so that a name finds the same one after a restart.
            yield f"{name} {numbers[name]}" if numbers[name] > 1 else name, callback
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if data is not None:
        yield type(data).__name__, data
    yield from numbered("optimizer", trainer.optimizers)
    yield from numbered("schedule", [config.scheduler for config in trainer.lr_scheduler_configs])
    loaders_of = {TRAINING: trainer.train_dataloader, VALIDATION: trainer.val_dataloaders}
    for name, loaders in loaders_of.items():
        if loaders is not None:
            # One with a state of its own places what it holds itself.
            yield from numbered(name, without_states(find_loaders(loaders)))


def numbered(name: str, values: Any) -> Iterator[tuple[str, Any]]:
    """Each value with a name of its own."""
    for number, value in enumerate(values):
        yield f"{name} {number}", value


def name_in_note(trainer: L.Trainer, before: str, names: list[str], after: str = "") -> None:
    """Print a note with these names in it, if there are any."""
    if names:
        print_note(trainer, f"Note: {before}{join_names(names)}{after}")
