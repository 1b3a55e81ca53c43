"""The training data continue where a run was interrupted, whatever loader gives them."""

from collections.abc import Callable
from functools import partial
from itertools import chain, repeat
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch import Tensor
from torch.utils.data import DataLoader

from samestep.callbacks.batch_digest import BatchDigest
from samestep.callbacks.notes import join_names, print_note
from samestep.callbacks.run_state import Part, Saved
from samestep.callbacks.watchdog import Watchdog
from samestep.data.loaders import find_batch_loaders, find_loaders, without_states
from samestep.data.sampler import ExactLoader
from samestep.data.seeds import mix_seed, seed_all, seed_sample
from samestep.data.torch_loaders import (
    ResumableBatches,
    are_split,
    is_longer,
    resumable,
    unwrap,
)
from samestep.errors import ConfigError
from samestep.ranks import virtual
from samestep.ranks.compat import callbacks_of
from samestep.ranks.process_group import gather

NOTE_ON_OTHER_RANKS = (
    "Note: this epoch began on {} ranks, and continues on {}. The rest of it sees other samples, "
    "because an ordinary DataLoader gives each rank samples of its own."
)
NOTE_ON_READING = (
    "Note: the run continues within an epoch. It reads {} batches again, which it trained on "
    "before, because the training data give one batch after the other."
)
NOTE_ON_STATES_OF_RANKS = (
    "Note: the checkpoint has the states of the training loaders of {} ranks, and {} ranks cannot "
    "continue with them. The loaders start over."
)
NOTE_ON_ORDER = (
    "Note: the batches come in order, in spite of in_order=False: otherwise nothing would know "
    "which of them an interrupted epoch has left."
)
NOTE_ON_OTHER_BATCH = (
    "batch {} of epoch {} is another one than it was before the interruption: {} is in no "
    "checkpoint"
)
REMEDY = (
    "Keep it by state_dict of the DataModule or the loader. `samestep verify -- <command>` finds it"
)


class DataResume(Part):
    """Lets the training data continue where the run was interrupted.

    - A ``BatchLoader`` and an ordinary DataLoader continue with the batch after the last step. The
      order of a DataLoader is a pure function of the seed and the epoch. The random numbers with
      which it reads a batch are seeded before, by the number of the batch.
    - A loader with ``state_dict`` and ``load_state_dict`` continues from its state, each rank from
      its own.
    - Any other loader gives one batch after the other, and is read up to the next one.

    A ``generator`` of a DataLoader or of its sampler continues with the state that it had before
    the epoch's order was drawn. ``samestep.loops`` calls ``begin`` and ``begin_batch``.

    Args:
        seed: of the run.
    """

    key = "data"

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.epoch = 0
        self.batch = 0  # batches of this epoch that were trained on before this process
        self.num_skipped = 0  # of these, batches that are not read again
        self._is_first_epoch = True  # of this process
        self._places: list[ResumableBatches] = []  # where batches can be skipped
        self._generators: list[Tensor] = []  # the states of generators before this epoch's order
        self._num_read = 0  # batches of this epoch that were read or skipped
        self._num_to_read = 0  # batches to read again, because they cannot be skipped
        self._seeds_batches = False  # a BatchLoader seeds its own
        self._unordered: list[Any] = []  # loaders whose batches come in another order otherwise
        self._watchdogs: list[Watchdog] = []
        # From a checkpoint:
        self._checksums: list[int | None] = []  # of the next batch of each loader
        self._loader_states: list[dict[str, Any]] = []  # of this rank
        self._saved_generators: list[Tensor] = []
        self._saved_epoch_is_over = False
        self._saved_world_size = 0
        # The digests of the slices that come next, of this process; 0 if unknown.
        self._expected: list[int] = []
        # The slices that were read, and are not trained on yet.
        self._fetched: list[Any] = []
        self.note = ""
        """In what the first batch differs, after an interruption; empty if in nothing."""

    def take_batch(
        self, trainer: L.Trainer, slices: list[Any], suspects: Callable[[], list[str]]
    ) -> None:
        """Compare the first batch of a run that continues with the one that was next; see ``note``.

        Whatever data sets, transforms and loaders keep, in whichever process: if it matters and is
        in no checkpoint, this batch is another one.

        Args:
            trainer: of the run.
            slices: of this process; empty where ``training_step`` reads for itself.
            suspects: gives the names of what reading changes, if the batch is another one.
        """
        expected, self._expected = self._expected, []
        self._fetched = slices
        if not expected:
            return
        found = digests_of(slices)
        is_same = all(map(is_equal_if_known, expected, found))
        if all(gather(is_same)):
            return
        cause = join_names(suspects()) or "what the data set, a transform or the loader keeps"
        self.note = NOTE_ON_OTHER_BATCH.format(self.batch, self.epoch, cause)
        print_note(trainer, f"Note: {self.note}. {REMEDY}")

    def forget_batch(self) -> None:
        """The batch is trained on now."""
        self._fetched = []

    def begin(self, trainer: L.Trainer) -> None:
        """Place the data where they were; called before Lightning makes their first iterator."""
        self._place(trainer)
        self._note_generators(trainer)
        if len(self._saved_generators) == len(self._generators):
            self._generators = self._saved_generators
        self._set_generators(trainer)
        for loader in self._others(trainer):
            if not getattr(loader, "in_order", True):
                # Of batches that come as they are ready, the first ones would not be those that
                # were trained on before.
                loader.in_order = True
                self._unordered.append(loader)
                print_note(trainer, NOTE_ON_ORDER)
            if hasattr(loader, "load_state_dict") and isinstance(loader, DataLoader):
                # It asks for its order twice where it continues: both must be that of the epoch.
                before_each_order(loader, partial(self._seed_draw, trainer))
        if self.batch:
            self._say_how_it_continues(trainer)

    def take_loader_states(self) -> tuple[list[dict[str, Any]], bool]:
        """The states of this rank's loaders in the checkpoint, once; whether of an epoch's end."""
        states, self._loader_states = self._loader_states, []
        return states, self._saved_epoch_is_over

    def take_num_to_read(self) -> int:
        """Batches that must be read again before the next one, once."""
        num, self._num_to_read = self._num_to_read, 0
        return num

    def seed_order(self) -> None:
        """Seed the order of an epoch, and its loader processes; called before both begin."""
        seed_all(mix_seed(self.seed, self.epoch))

    def _seed_draw(self, trainer: L.Trainer) -> None:
        """Let a sampler draw the order of this epoch, for the first time or again."""
        self.seed_order()
        self._set_generators(trainer)

    def begin_batch(self) -> None:
        """Seed the random numbers with which this process reads a slice of a batch."""
        if not self._seeds_batches:
            return
        own = virtual.layout().own
        step, number = divmod(self._num_read, len(own))
        seed_sample(self.seed, self.epoch, step, own[number], 2)
        self._num_read += 1
        # Many batches may be read before the first step.
        for watchdog in self._watchdogs:
            watchdog.go_on()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin with the first epoch of this process."""
        self._is_first_epoch, self.note = True, ""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count the batches of this epoch."""
        self.epoch = trainer.current_epoch

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Place the data at the start of a new epoch."""
        # `begin` has done so for the first one, and loader processes may have begun to read.
        if not self._is_first_epoch:
            self._place(trainer)
            self._note_generators(trainer)
        self._is_first_epoch = False

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start counting again."""
        self.epoch, self.batch, self._checksums = trainer.current_epoch + 1, 0, []
        self._is_first_epoch = False
        self._note_generators(trainer)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raise a ConfigError if there was no batch, which Lightning takes for the end."""
        if trainer.fit_loop.max_batches != 0 or not trainer.limit_train_batches:
            return
        sizes = []
        for loader in find_loaders(trainer.train_dataloader):
            if hasattr(loader, "dataset"):
                sizes.append(f"{len(loader.dataset)} samples")
        raise ConfigError(
            f"the training data: no batch in {', '.join(sizes) or 'an epoch'}; with "
            "drop_last=True an epoch needs a full one: use a smaller batch or more data"
        )

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leave the loaders as they were."""
        stages = [trainer.train_dataloader, trainer.val_dataloaders, trainer.test_dataloaders]
        for loader in find_loaders(stages):
            unwrap(loader)
        for loader in self._unordered:
            loader.in_order = False
        self._unordered.clear()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Leave them so in a notebook too, where the program goes on."""
        self.teardown(trainer, pl_module, "")

    def save(self, trainer: L.Trainer, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Keep how far the epoch has come, and the states of the loaders of each rank."""
        loop: Any = trainer.fit_loop
        epochs = loop.epoch_progress.current
        is_within_epoch = epochs.processed < epochs.ready
        batch = loop.num_trained_batches() if is_within_epoch else 0
        # Lightning keeps the states of rank zero only.
        states = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
        checksums = [place.checksum(batch) for place in self._places]
        # What a DataModule counts while it reads is ahead by the batch of the next step.
        training_data: Any = trainer.fit_loop.training_data  # type: ignore[attr-defined]
        _, of_data = (None, None) if training_data is None else training_data.states_before_step()
        if of_data is not None:
            checkpoint[type(trainer.datamodule).__qualname__] = of_data  # type: ignore[attr-defined]
        return {
            "epoch": epochs.processed,
            "batch": batch,
            "generators": self._generators,
            "loaders": states,
            "checksums": checksums,
            "next": digests_of(self._fetched),
        }

    def load(self, trainer: L.Trainer, checkpoint: dict[str, Any], saved: Saved) -> None:
        """Remember it; the states of this rank's loaders are loaded when the loaders exist."""
        self.epoch, self.batch = saved.own["epoch"], saved.own["batch"]
        self._saved_generators = saved.own["generators"]
        self._saved_world_size = len(saved.ranks)
        loop = checkpoint["loops"]["fit_loop"]
        progress = loop["epoch_progress"]["current"]
        self._saved_epoch_is_over = progress["processed"] == progress["ready"]
        # Lightning finds none then.
        loop["state_dict"].pop("combined_loader", None)
        # Slices of a batch have the same checksum, on any number of ranks.
        self._checksums = saved.own["checksums"]
        layout = virtual.layout()
        digests = [*chain.from_iterable(rank["next"] for rank in saved.ranks)]
        if len(digests) == layout.total:
            self._expected = [digests[number] for number in layout.own]
        if saved.is_same_number:
            self._loader_states = saved.own["loaders"]
        elif saved.own["loaders"]:
            numbers = len(saved.ranks), trainer.world_size
            print_note(trainer, NOTE_ON_STATES_OF_RANKS.format(*numbers))

    def _note_generators(self, trainer: L.Trainer) -> None:
        generators = generators_of(trainer.train_dataloader)
        self._generators = [generator.get_state() for generator in generators]

    def _set_generators(self, trainer: L.Trainer) -> None:
        generators = generators_of(trainer.train_dataloader)
        for generator, state in zip(generators, self._generators, strict=True):
            generator.set_state(state)

    def _others(self, trainer: L.Trainer) -> list[Any]:
        """The training loaders that are no BatchLoader."""
        loaders = find_loaders(trainer.train_dataloader)
        return [loader for loader in loaders if not isinstance(loader, ExactLoader)]

    def _positions(self, others: list[Any]) -> list[ResumableBatches | None]:
        """Where batches can be skipped, for each loader without a state; None: they are read."""
        return [resumable(loader, self.seed) for loader in without_states(others)]

    def _place(self, trainer: L.Trainer) -> None:
        """Begin with the batch after the last step: skip those before, or read and drop them."""
        others = self._others(trainer)
        first = self.batch if self._can_skip(trainer, others) else 0
        for loader in others:
            set_epoch(loader, self.epoch)
        self._places = [place for place in self._positions(others) if place is not None]
        checksums = chain(self._checksums, repeat(None))
        for position, checksum in zip(self._places, checksums, strict=False):
            position.start_at(self.epoch, first, checksum)
        for loader in find_batch_loaders(trainer.train_dataloader):
            place = first
            # The shorter one of two loaders begins again within an epoch.
            if 0 < len(loader) < trainer.num_training_batches:
                place %= len(loader)
            loader.start_at(self.epoch, place)
        self._seeds_batches = bool(others)
        self.num_skipped = first
        self._num_read = first * len(virtual.layout().own)
        self._num_to_read = self.batch - first
        self._watchdogs = callbacks_of(trainer, Watchdog)

    def _can_skip(self, trainer: L.Trainer, others: list[Any]) -> bool:
        """Whether every loader can begin with any batch, or continues with its own state."""
        positions: list[Any] = self._positions(others)
        if len(positions) < len(others):
            # To read batches again would move a loader with a state past its own.
            return True
        if None in positions:
            return False
        if not repeats_shorter_loaders(trainer):
            return True
        # A shorter loader that has begun again is read: its passes may have other orders.
        return all(is_longer(position.batches, self.batch) for position in positions)

    def _say_how_it_continues(self, trainer: L.Trainer) -> None:
        saved, now = self._saved_world_size, trainer.world_size
        if saved != now and not are_split(without_states(self._others(trainer))):
            print_note(trainer, NOTE_ON_OTHER_RANKS.format(saved, now))
        if self._num_to_read:
            print_note(trainer, NOTE_ON_READING.format(self._num_to_read))


def digests_of(slices: list[Any]) -> list[int]:
    """A digest of each slice of a batch; 0 if nothing could be read."""
    return [BatchDigest(slice_).checksum for slice_ in slices]


def is_equal_if_known(ours: int, theirs: int) -> bool:
    """Whether two digests are equal, or one is unknown."""
    return 0 in (ours, theirs) or ours == theirs


def generators_of(loaders: Any) -> list[torch.Generator]:
    """The generators of ordinary DataLoaders and of their samplers, each once."""
    found: dict[int, torch.Generator] = {}
    for loader in find_loaders(loaders):
        if not isinstance(loader, DataLoader):
            continue
        inner_sampler = getattr(loader.batch_sampler, "sampler", None)
        owners = [loader, loader.sampler, loader.batch_sampler, inner_sampler]
        for owner in [*owners, *map(distributed_sampler, owners)]:
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
    return list(found.values())


def repeats_shorter_loaders(trainer: L.Trainer) -> bool:
    """Whether the shorter ones of several training loaders begin again within an epoch."""
    loaders: Any = trainer.fit_loop._combined_loader
    return len(loaders.flattened) > 1 and loaders._mode == "max_size_cycle"


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the samplers of a loader the epoch, as Lightning 2.6 does when it begins one.

    In a run that continues, loader processes ask for their first batches before that.
    """
    _set_sampler_epoch(loader, epoch)


def distributed_sampler(sampler: Any) -> Any:
    """The sampler whose order Lightning 2.6 distributes over the ranks by ``sampler``; or None."""
    is_wrapper = isinstance(sampler, DistributedSamplerWrapper)
    return sampler.dataset._sampler if is_wrapper else None


def before_each_order(loader: Any, function: Callable[[], None]) -> None:
    """Let ``function`` act before each order that a sampler draws which is distributed so."""
    samplers: list[Any] = [loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
    for sampler in samplers:
        if distributed_sampler(sampler) is None:
            continue
        orders: Any = sampler.dataset
        draw = type(orders).reset

        def act_and_draw(orders: Any = orders, draw: Any = draw) -> None:
            function()
            draw(orders)

        orders.reset = act_and_draw
