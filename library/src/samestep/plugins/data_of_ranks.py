"""Says what several ranks do with the training data: divided twice, not at all, or in part."""

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
from torch.utils.data import IterableDataset

from samestep.callbacks.batch_digest import BatchDigest
from samestep.callbacks.notes import print_note
from samestep.data.loaders import find_batch_loaders, find_loaders
from samestep.data.sampler import ExactLoader
from samestep.data.seeds import draws, isolated_rng
from samestep.data.torch_loaders import are_split, has_batches_of_ids, split_of
from samestep.errors import ConfigError
from samestep.option_names import setting
from samestep.plugin import Plugin
from samestep.ranks import environment
from samestep.ranks.process_group import gather
from samestep.run_spec import RunSpec

NOTE_ON_RANKS = (
    "Note: the training data come from an ordinary DataLoader. Its batch_size counts samples per "
    "rank, and some samples are repeated to give all ranks as many. {} splits each batch instead, "
    "unless the sampler is distributed already, and is exact on any number of ranks."
)
NOTE_ON_STREAMS = (
    "Note: the training data give one batch after the other, and no batch can be split. Each of "
    "several ranks sees all samples, unless the data set or its sampler divides them. "
    "samestep.BatchLoader, of a data set with a length, is exact on any number of ranks."
)
NOTE_ON_DRAWS = (
    "Note: the data set or its collate_fn draws random numbers for whole batches, so they depend "
    "on the number of ranks. Transforms of single samples do not, and for a BatchLoader "
    "collate_fn=default_collate makes them so."
)
NOTE_ON_REPEATED = (
    "Note: all {0} ranks have read the same first batch of a stream, so they train on each sample "
    "{0} times. Let the data set give each rank samples of its own, by torch.distributed.get_rank()"
)
BATCH_SIZE = re.compile(r"(.+_)?(batch_?size|global_?batch|bs)")


def callback(spec: RunSpec) -> L.Callback | None:
    """``DataOfRanks``, if there are several ranks."""
    return DataOfRanks() if environment.world_size() > 1 else None


class DataOfRanks(Plugin):
    """Rejects a batch size that the user's data have divided; says what ranks see of the data.

    Lightning gives every rank a stream whole; only its data set can divide it.
    """

    def __init__(self) -> None:
        self._compares = False  # in the next batch

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compare the batch sizes of the loaders with those that the data were given.

        Raises:
            ConfigError: if a loader has a hyperparameter, divided by the number of ranks.
        """
        num_ranks = trainer.world_size
        loaders = [*find_loaders(trainer.train_dataloader)]
        data_sets = [getattr(loader, "dataset", None) for loader in loaders]
        self._compares = any(isinstance(data, IterableDataset) for data in data_sets)
        given = given_batch_sizes(trainer)
        for size, divides in map(find_batch_size, loaders):
            name = None if size is None else find_multiple(given, size, num_ranks)
            if name is not None:
                raise ConfigError(
                    f"the data divide {name}={given[name]} by {num_ranks} ranks to "
                    f"batch_size={size}, and {divides} divides each batch over the ranks again; "
                    f"let the loader take all {given[name]}: {divides} counts samples over all "
                    "ranks"
                )
        if trainer.is_global_zero:
            for note in notes_on(loaders):
                print_note(trainer, note)

    def on_batch_read(self, trainer: L.Trainer, batch_idx: int, batch: Any) -> None:
        """Say that the ranks have read the same samples first, if they have."""
        if not self._compares:
            return
        self._compares = False
        digests = gather(BatchDigest(batch).checksum)
        # 0 if nothing could be compared, such as what a GPU holds.
        if digests[0] != 0 and len(set(digests)) == 1:
            print_note(trainer, NOTE_ON_REPEATED.format(len(digests)))


def notes_on(loaders: list[Any]) -> Iterator[str]:
    """What the training data cannot give to several ranks, each in a sentence."""
    others = [loader for loader in loaders if not isinstance(loader, ExactLoader)]
    if not are_split(others):
        can_split = all(map(has_batches_of_ids, others))
        note = NOTE_ON_RANKS if can_split else NOTE_ON_STREAMS
        yield note.format(setting("split_batches", True))
    if draws_for_batches(loaders):
        yield NOTE_ON_DRAWS


def find_multiple(given: Mapping[str, int], size: int, num_ranks: int) -> str | None:
    """The name of a batch size that gives this one if it is divided by the number of ranks."""
    # The loader has what it was given.
    if size in given.values():
        return None
    for name, value in given.items():
        if value // num_ranks == size < value:
            return name
    return None


def find_batch_size(loader: Any) -> tuple[int | None, str]:
    """How many samples a batch of all ranks has, None if unknown; and what divides it."""
    if isinstance(loader, ExactLoader):
        return loader.order.batch_size, "BatchLoader"
    size = getattr(getattr(split_of(loader), "batches", None), "batch_size", None)
    # A user's own batch sampler may have anything under this name.
    if not isinstance(size, int):
        size = None
    return size, setting("split_batches", True)


def given_batch_sizes(trainer: L.Trainer) -> dict[str, int]:
    """The batch sizes that the data, or the model, were given, by their names."""
    for owner in (getattr(trainer, "datamodule", None), trainer.lightning_module):
        # Not ``hparams``, which the data may have divided in place.
        sizes = dict(batch_sizes_in(getattr(owner, "hparams_initial", {})))
        if sizes:
            return sizes
    return {}


def batch_sizes_in(values: Any) -> Iterator[tuple[str, int]]:
    """The batch sizes in values by their names, also in groups of values."""
    if not isinstance(values, Mapping):
        return
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from batch_sizes_in(value)
        elif type(value) is int and BATCH_SIZE.fullmatch(str(name)):
            yield str(name), value


def draws_for_batches(loaders: Any) -> bool:
    """Whether random numbers are drawn for a slice, and not for each sample."""
    exact = [*find_batch_loaders(loaders)]
    # Without a split each rank has batches of its own, which another note says.
    split = [loader for loader in find_loaders(loaders) if loader in exact or are_split([loader])]
    return any(loader.draws_by_slice() for loader in exact) or any(map(draws_in_collation, split))


def draws_in_collation(loader: Any) -> bool:
    """Whether the ``collate_fn`` of a loader draws random numbers; it reads two samples for that.

    It has the samples of one slice only, and draws other numbers for another slice.
    """
    collate = getattr(loader, "slices", loader).collate_fn
    # torch's own draw nothing; without one the data set makes the batch.
    if collate is None or getattr(collate, "__module__", "").startswith("torch."):
        return False
    try:
        with isolated_rng():
            # A copy, because a data set may count what it reads.
            data = copy.copy(loader.dataset)
            samples = [data[0], data[1]]
        return draws(lambda: collate(samples))
    except Exception:
        # Such as a data set without these indices, whose error the first batch would raise too.
        return False
