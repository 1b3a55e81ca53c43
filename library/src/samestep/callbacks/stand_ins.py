"""Objects that a module of a library saves: a loss, a metric, an encoder.

A checkpoint never holds them, as reading them back could call any code. It holds a stand-in with
their values. The program that resumes makes these objects anyway, so its module is asked for them
as for a checkpoint, and each gets the values of its stand-in. Nothing is made from the file.
"""

import hashlib
import logging
import pickle
from collections import OrderedDict
from collections.abc import Callable, Container
from typing import Any

import lightning as L
from torch import nn

from samestep.callbacks.state_codec import (
    MISSING,
    UNTRACKED,
    Decoder,
    Encoder,
    Packed,
    name_of,
    storage_of,
)
from samestep.ranks import environment
from samestep.run.checkpoint import CheckpointError, find_unreadable

log = logging.getLogger(__name__)

MARK = "samestep stand-in"
MAX_ITEMS = 100_000  # of one object
Place = tuple[Any, ...]
"""The keys that lead to an object from the top of a checkpoint."""


class Everything(Container[int]):
    """Contains all ids: each object is restored in place."""

    def __contains__(self, item: object) -> bool:
        return True


class StandIns:
    """Takes the objects of one module out of its checkpoints, and puts them back.

    Args:
        module: whose ``on_save_checkpoint`` saves them.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self.module = module
        self.keys_of_others: set[str] | None = None
        """The keys of a checkpoint before the module adds its own; None: not yet known."""
        self._digests: dict[Place, str] = {}
        self._lost: set[Place] = set()

    def take_out(self, checkpoint: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The checkpoint with stand-ins for the objects of the module, and the names of these."""
        if self.keys_of_others is None:
            return checkpoint, []
        names = []
        saved = {id(tensor) for tensor in checkpoint["state_dict"].values()}
        saved.update(storage_of(tensor) for tensor in checkpoint["state_dict"].values())

        def replace(place: Place, value: Any) -> Any:
            names.append(f"{'.'.join(map(str, place))} ({type(value).__qualname__})")
            return self._describe(place, value, saved)

        taken = dict(checkpoint)
        for key in checkpoint.keys() - self.keys_of_others:
            taken[key] = map_objects((key,), checkpoint[key], replace)
        return taken, sorted(names)

    def put_back(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint with the objects of this program, which get the values of the stand-ins.

        Raises:
            CheckpointError: if this program does not make such an object.
        """
        keys = [key for key, value in checkpoint.items() if has_stand_in(value)]
        if not keys:
            return checkpoint
        own: dict[str, Any] = {
            "state_dict": self.module.state_dict(),
            L.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY: dict(self.module.hparams),
            "epoch": 0,
            "global_step": 0,
        }
        self.module.on_save_checkpoint(own)
        filled = dict(checkpoint)
        for key in keys:
            filled[key] = self._fill(key, checkpoint[key], own.get(key, MISSING))
        return filled

    def _describe(self, place: Place, value: Any, saved: set[int]) -> dict[str, Any]:
        packed = Packed()
        encoder = Encoder(saved, packed.put, MAX_ITEMS, Everything())
        encoded = encoder.encode(value)
        # The weights of a module and what a metric counts are part of each checkpoint anyway.
        if not isinstance(value, nn.Module) and not (encoder.is_complete and is_whole(encoded)):
            self._compare(place, value)
        return {MARK: name_of(type(value)), "values": encoded, "bytes": packed.joined()}

    def _compare(self, place: Place, value: Any) -> None:
        """Say once if training changes an object whose values cannot all be kept."""
        try:
            digest = hashlib.sha256(pickle.dumps(value)).hexdigest()
        # Code of the object runs here, and may raise anything.
        except Exception:
            return
        if self._digests.setdefault(place, digest) != digest and place not in self._lost:
            self._lost.add(place)
            print(
                "Note: training changes these objects, and no checkpoint holds all their values: "
                f"{'.'.join(map(str, place))}. A run that resumes starts with their first values",
                flush=True,
            )

    def _fill(self, path: str, value: Any, own: Any) -> Any:
        """The value with the objects in ``own`` in the places of its stand-ins."""
        if is_stand_in(value):
            return self._restore(path, value, own)
        if type(value) in (dict, OrderedDict):
            items = {}
            for key, item in value.items():
                items[key] = self._fill(f"{path}.{key}", item, item_of(own, key))
            return type(value)(items)
        if type(value) in (list, tuple):
            parts = []
            for key, item in enumerate(value):
                parts.append(self._fill(f"{path}.{key}", item, item_of(own, key)))
            return type(value)(parts)
        return value

    def _restore(self, path: str, stand_in: dict[str, Any], own: Any) -> Any:
        name = stand_in[MARK]
        if own is MISSING or name_of(type(own)) != name:
            made = "nothing" if own is MISSING else f"a {type(own).__qualname__}"
            raise CheckpointError(
                f"the run cannot continue: {path} was a {name.partition(':')[2]}, and "
                f"{type(self.module).__qualname__} makes {made} there. Restore the old code, or "
                "start a new run"
            )
        now = self._describe((), own, set())
        is_equal = now["values"] == stand_in["values"] and now["bytes"].equal(stand_in["bytes"])
        # Most objects never change.
        if is_equal:
            return own
        decoder = Decoder(stand_in["bytes"], self.module.device)
        try:
            return decoder.decode(own, stand_in["values"])
        # Code of the object runs here, and may raise anything.
        except Exception:
            log.debug("%s cannot be restored", path, exc_info=True)
            # Every rank reads the checkpoint.
            if environment.rank() == 0:
                print(
                    f"Note: the checkpoint holds values of {path} that cannot be restored in this "
                    "program. The run continues with their first values",
                    flush=True,
                )
            return own


def map_objects(place: Place, value: Any, replace: Callable[[Place, Any], Any]) -> Any:
    """The value with something else in the place of each object that cannot be read back."""
    if find_unreadable(value, "") is None:
        return value
    if type(value) in (dict, OrderedDict):
        items = {key: map_objects((*place, key), item, replace) for key, item in value.items()}
        return type(value)(items)
    if type(value) in (list, tuple):
        parts = [map_objects((*place, key), item, replace) for key, item in enumerate(value)]
        return type(value)(parts)
    return replace(place, value)


def is_stand_in(value: Any) -> bool:
    """Whether it is the stand-in of an object."""
    return type(value) is dict and MARK in value


def has_stand_in(value: Any) -> bool:
    """Whether there is a stand-in within a value."""
    if is_stand_in(value):
        return True
    if type(value) in (dict, OrderedDict):
        return any(map(has_stand_in, value.values()))
    return type(value) in (list, tuple) and any(map(has_stand_in, value))


def is_whole(encoded: Any) -> bool:
    """Whether nothing was left out of an encoded value."""
    if isinstance(encoded, (list, tuple)):
        return encoded != UNTRACKED and all(map(is_whole, encoded))
    return True


def item_of(container: Any, key: Any) -> Any:
    """An item of a container of this program; MISSING where it has none."""
    try:
        return container[key]
    except (LookupError, TypeError):
        return MISSING
