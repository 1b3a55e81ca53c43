"""Objects that a module of a library saves: a loss, a metric, an encoder.

A checkpoint never holds them, as reading them back could call any code. It holds a mark in their
place, and what they hold (``samestep.heap``). The program that resumes makes these objects anyway,
so its module is asked for them as for a checkpoint, and each gets back what it held.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import lightning as L

from samestep.callbacks.notes import join_names
from samestep.heap.heap import Heap
from samestep.ranks import environment
from samestep.ranks.strategies import class_of
from samestep.run.checkpoint import CheckpointError, find_unreadable

MARK = "samestep stand-in"
VALUES = "objects_of_module"


class StandIns:
    """Takes the objects of one module out of its checkpoints, and puts them back.

    Args:
        module: whose ``on_save_checkpoint`` saves them.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self.module = module
        self.keys_of_others: set[str] | None = None
        """The keys of a checkpoint before the module adds its own; None: not yet known."""

    def take_out(self, checkpoint: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The checkpoint with marks for the objects of the module, and the names of these."""
        if self.keys_of_others is None:
            return checkpoint, []
        objects: dict[str, Any] = {}

        def replace(place: str, value: Any) -> Any:
            objects[place] = value
            return {MARK: name_of(value)}

        taken = dict(checkpoint)
        for key in checkpoint.keys() - self.keys_of_others:
            taken[key] = map_objects(key, checkpoint[key], replace)
        if not objects:
            return checkpoint, []
        taken[VALUES] = heap_of(objects, checkpoint).dump()
        return taken, sorted(
            f"{place} ({class_of(value).__qualname__})" for place, value in objects.items()
        )

    def put_back(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint with the objects of this program, which get the values that were saved.

        Raises:
            CheckpointError: if this program does not make such an object.
        """
        if VALUES not in checkpoint:
            return checkpoint
        own: dict[str, Any] = {
            "state_dict": self.module.state_dict(),
            L.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY: dict(self.module.hparams),
            "epoch": 0,
            "global_step": 0,
        }
        self.module.on_save_checkpoint(own)
        objects: dict[str, Any] = {}
        map_objects("", own, lambda place, value: objects.setdefault(place, value))
        failed = heap_of(objects, own).load(checkpoint[VALUES], self.module.device)
        if failed and environment.rank() == 0:
            print(
                f"Note: the checkpoint holds values of {join_names(sorted(failed))} that cannot be "
                "restored in this program. The run continues with their first values",
                flush=True,
            )

        def fill(place: str, mark: dict[str, str]) -> Any:
            made = objects.get(place)
            if name_of(made) != mark[MARK]:
                shown = "nothing" if made is None else f"a {type(made).__qualname__}"
                raise CheckpointError(
                    f"the run cannot continue: {place} was a {mark[MARK].partition(':')[2]}, and "
                    f"{type(self.module).__qualname__} makes {shown} there. Restore the old code, "
                    "or start a new run"
                )
            return made

        filled = {key: value for key, value in checkpoint.items() if key != VALUES}
        return {key: map_marks(key, value, fill) for key, value in filled.items()}


def heap_of(objects: dict[str, Any], checkpoint: dict[str, Any]) -> Heap:
    """These objects by their places, with all that no weight of the checkpoint holds."""
    heap = Heap()
    heap.name_objects({"checkpoint": objects}, [*checkpoint["state_dict"].values()])
    return heap


def name_of(value: Any) -> str:
    """The name of the class of an object."""
    kind = class_of(value)
    return f"{kind.__module__}:{kind.__qualname__}"


def map_objects(place: str, value: Any, replace: Callable[[str, Any], Any]) -> Any:
    """The value with something else in the place of each object that cannot be read back."""
    if find_unreadable(value, "") is None:
        return value
    return map_parts(place, value, lambda where, part: map_objects(where, part, replace), replace)


def map_marks(place: str, value: Any, fill: Callable[[str, Any], Any]) -> Any:
    """The value with something else in the place of each mark."""
    if type(value) is dict and MARK in value:
        return fill(place, value)
    return map_parts(
        place, value, lambda where, part: map_marks(where, part, fill), lambda _, part: part
    )


def map_parts(place: str, value: Any, go_on: Any, end: Any) -> Any:
    """A list or a dictionary of what ``go_on`` makes of its parts; of others what ``end`` does."""
    start = f"{place}." if place else ""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, go_on(f"{start}{key}", part)) for key, part in value.items())
    if type(value) in (list, tuple):
        return type(value)(go_on(f"{start}{key}", part) for key, part in enumerate(value))
    return end(place, value)
