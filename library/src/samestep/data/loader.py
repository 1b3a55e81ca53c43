"""Batches of any data set in an exact order, shared out over the ranks."""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from samestep.data.order import Blocks
from samestep.data.sampler import GlobalBatchSampler, Slice
from samestep.data.seeds import generator, isolated_rng, seed_sample
from samestep.data.threads import ReadAheadPool
from samestep.errors import ConfigError, RunError
from samestep.ranks import environment


class BatchDataset(Protocol):
    """A data set that gives several samples at once."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, ids: Tensor) -> Any:
        """The samples ``ids``, int64 ``[B]``, as one batch. ``B`` may be 0 in evaluation."""
        ...


class BatchLoader:
    """Batches in an order that depends on the seed and the epoch only.

    Each optimizer step sees the same samples on any number of ranks, and a run that continues goes
    on with the batch after its last step. Under a Trainer, ``DataResume`` says where to begin.

    A data set may draw random numbers from torch, NumPy and Python's ``random``. With
    ``collate_fn`` they depend on the seed, the epoch and the sample only, otherwise on the seed,
    the epoch, the batch and where the rank's slice begins in it. They never depend on interruptions
    or on ``num_workers``. Generators of the data set's own are not seeded. A data set that draws
    none may say so by an attribute, ``draws_random_numbers = False``: a batch takes 0.03 ms less.

    Args:
        dataset: answers ``dataset[ids]`` for a tensor of positions; ``TensorDataset`` does.
            With ``collate_fn``, it answers ``dataset[id]`` for one position, as most data sets do.
        batch_size: samples per optimizer step, over all ranks. It need not divide by their number.
        shuffle: draw a new order each epoch; otherwise keep that of the data set. ``Blocks(1024)``
            draws one that reads neighbours together, for files that are slow to read at random.
        drop_last: leave out samples that do not fill an optimizer step.
        seed: of the order, and of the random numbers that the data set draws.
        accumulate_grad_batches: batches into which an optimizer step is cut, as the Trainer
            accumulates them.
        num_workers: processes that read ahead; 0 reads in this process.
        num_threads: threads that read ahead, for data that are waited for, such as those of an
            object store. Twice as many batches are in memory. The data set must allow it, and must
            not draw random numbers, because threads share them.
        transform: changes each batch where it is read, such as an augmentation. It is called with
            the batch and its ``Slice``, whose ``generator`` gives random numbers that do not depend
            on the number of ranks.
        collate_fn: makes a batch of a list of samples, such as
            ``torch.utils.data.default_collate``. None: the data set gives batches.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool | Blocks = False,
        drop_last: bool = False,
        seed: int = 0,
        accumulate_grad_batches: int = 1,
        num_workers: int = 0,
        num_threads: int = 0,
        transform: Callable[[Any, Slice], Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.dataset = dataset
        self.slices = _Slices(dataset, seed, collate_fn, transform)
        # An attribute called `sampler` would make Lightning take this for a DataLoader.
        self.order = GlobalBatchSampler(
            len(dataset),
            batch_size,
            rank=environment.rank(),
            world_size=environment.world_size(),
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            batches_per_step=accumulate_grad_batches,
        )
        self.num_threads = num_threads
        if num_threads < 0 or (num_threads and num_workers):
            raise ConfigError(
                f"num_threads={num_threads}, num_workers={num_workers}: batches are read ahead by "
                "so many threads or by so many processes; one of them must be 0"
            )
        self.workers: DataLoader[Any] | None = None
        if num_workers:
            self.workers = DataLoader(
                self.slices,
                sampler=self.order,
                batch_size=None,
                num_workers=num_workers,
                persistent_workers=True,
                pin_memory=torch.cuda.is_available(),
                # The global random state is left alone; torch's own default is the same everywhere.
                generator=generator(seed),
            )

    def __len__(self) -> int:
        return len(self.order)

    def start_at(self, epoch: int, batch: int) -> None:
        """Begin the next pass with this batch of this epoch."""
        self.order.epoch = epoch
        self.order.first_batch = batch

    def draws_by_slice(self) -> bool:
        """Whether a batch of the data set has random numbers, which depend on the rank's slice."""
        return self.slices.collate_fn is None and self._draws()

    def _draws(self) -> bool:
        """Whether the data set draws random numbers.

        It reads one sample of a shallow copy, so that nothing is counted.
        """
        if type(self.dataset) is TensorDataset:
            return False

        def draw() -> tuple[float, ...]:
            return torch.rand(()).item(), np.random.rand(), random.random()

        with isolated_rng():
            seed_sample(0)
            untouched = draw()
            seed_sample(0)
            try:
                copy.copy(self.dataset)[0 if self.slices.collate_fn else torch.tensor([0])]
            except RunError:  # a store that was waited for
                raise
            except Exception:  # anything else that is wrong is said when the first batch is read
                pass
            return draw() != untouched

    def __iter__(self) -> Iterator[Any]:
        # This is a generator, so the order is looked up when the first batch is asked for.
        # Lightning makes the iterator earlier, before it has restored the state of the run.
        first = self.order.first_batch
        if not self.slices.are_seeded and self._draws():
            raise ConfigError(
                f"{type(self.dataset).__name__}.draws_random_numbers is False, but it draws some, "
                "which would not be the same after an interruption; leave this attribute out"
            )
        if self.num_threads:
            slices = self._read_ahead()
        else:
            slices = iter(self.workers or map(self.slices.__getitem__, self._expected()))
        for _ in range(first, len(self)):
            yield next(slices)

    def _expected(self) -> Iterator[Slice]:
        """The slices in their order; a data set that reads blocks learns of each some time before.

        Each of many ranks would read all blocks, and use little of them; they read rows instead.
        """
        blocks, order = self.order.shuffle, self.order
        if not isinstance(blocks, Blocks) or not hasattr(self.dataset, "expect"):
            yield from order
            return
        size, at_once = blocks
        depths = max(at_once, self.dataset.blocks_ahead), at_once
        ahead = next((n for n in depths if self.dataset.can_hold((at_once + n) * size)), 0)
        if order.world_size > 2 or not ahead:
            yield from order
            return
        batches = ahead * size * order.batches_per_step // order.batch_size
        waiting: deque[Slice] = deque()
        try:
            for place in order:
                self.dataset.expect(place.ids, size)
                waiting.append(place)
                if len(waiting) > batches:
                    yield waiting.popleft()
            yield from waiting
        except GeneratorExit:  # the rest will not be read
            self.dataset.forget()
            raise

    def _read_ahead(self) -> Iterator[Any]:
        """The slices in their order, each read by a thread as soon as there is room for it."""
        if self._draws():
            raise ConfigError(
                f"num_threads={self.num_threads}: the data set draws random numbers, which threads "
                "would share; read ahead by num_workers, or draw after the batch is read"
            )
        order, waiting = self._expected(), deque[Future[Any]]()
        readers = ReadAheadPool(self.num_threads)
        try:
            while True:
                for place in islice(order, 2 * self.num_threads - len(waiting)):
                    waiting.append(readers.submit(self.slices.read, place))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            readers.close()


class _Slices(Dataset[Any]):
    """The batches of a rank, by their slices."""

    def __init__(
        self,
        dataset: Any,
        seed: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        transform: Callable[[Any, Slice], Any] | None,
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.collate_fn = collate_fn
        self.transform = transform
        # Steps can be so short that seeds would be felt.
        may_draw = getattr(dataset, "draws_random_numbers", type(dataset) is not TensorDataset)
        self.are_seeded = may_draw or collate_fn is not None

    def __getitem__(self, place: Slice) -> Any:
        if not self.are_seeded:
            return self.read(place)
        with isolated_rng():
            return self.read(place, seed_sample)

    def read(self, place: Slice, seed: Callable[..., None] = lambda *_: None) -> Any:
        """Read a slice; ``seed`` is called with the numbers on which its random numbers depend."""
        if self.collate_fn is None:
            seed(self.seed, place.epoch, place.number, place.start)
            batch = self._read_batch(place)
        else:
            batch = self._collate(place, seed, self.collate_fn)
        if self.transform is not None:
            batch = self.transform(batch, place)
        return batch

    def _collate(
        self, place: Slice, seed: Callable[..., None], collate_fn: Callable[[list[Any]], Any]
    ) -> Any:
        samples = []
        # An empty slice is that of a rank that has no sample of a short batch in evaluation.
        for id in place.ids.tolist() or [0]:
            seed(self.seed, place.epoch, id)
            samples.append(self.dataset[id])
        batch = collate_fn(samples)
        if not len(place.ids):
            batch = apply_to_collection(batch, Tensor, lambda tensor: tensor[:0])
        return batch

    def _read_batch(self, place: Slice) -> Any:
        try:
            return self.dataset[place.ids]
        except (TypeError, ValueError, LookupError, RuntimeError) as error:
            error.add_note(
                "BatchLoader asked for dataset[ids] with a tensor of positions. If the data set "
                "answers one position at a time, write BatchLoader(..., collate_fn=default_collate)"
            )
            raise


def count_samples(batch: Any) -> int:
    """Samples in a batch: the length of its first tensor."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    parts = batch.values() if isinstance(batch, dict) else batch
    if not isinstance(batch, (dict, list, tuple)):
        return 0
    return next(filter(None, map(count_samples, parts)), 0)
