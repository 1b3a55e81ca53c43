"""Batches of any data set in an exact order, cut into a slice for each rank."""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from samestep.data.order import Blocks, make_order
from samestep.data.sampler import ExactLoader, GlobalBatchSampler, Slice
from samestep.data.seeds import draws, generator, isolated_rng, seed_sample
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


class BatchLoader(ExactLoader):
    """Batches in an order that depends on the seed and the epoch only.

    Each optimizer step sees the same samples on any number of ranks, and a run resumes with the
    batch after its last step. Under a Trainer, ``DataResume`` sets where to begin.

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
        num_threads: threads that read ahead, for data with a high latency, such as those of an
            object store. Twice as many batches are in memory. The data set must be thread-safe, and
            must not draw random numbers, because threads share them.
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
        self.shuffle = shuffle
        self.slices = _Slices(dataset, seed, collate_fn, transform)
        # Not called `sampler`: Lightning would take this for a DataLoader.
        self.order = GlobalBatchSampler(
            len(dataset),
            batch_size,
            rank=environment.rank(),
            world_size=environment.world_size(),
            order_of=partial(make_order, len(dataset), shuffle, seed),
            drop_last=drop_last,
            batches_per_step=accumulate_grad_batches,
        )
        self.num_threads = num_threads
        if num_threads < 0 or (num_threads and num_workers):
            raise ConfigError(
                f"num_threads={num_threads}, num_workers={num_workers}: batches are read ahead by "
                "so many threads or by so many processes; one of them must be 0"
            )
        self.workers = None
        if num_workers:
            self.workers = DataLoader(
                self.slices,
                sampler=self.order,
                # A slice is already a batch.
                batch_size=None,
                num_workers=num_workers,
                # Starting them takes seconds, for each epoch.
                persistent_workers=True,
                pin_memory=torch.cuda.is_available(),
                # Otherwise each pass draws a seed for its workers from torch's global generator,
                # and the training after it gets other random numbers than without workers.
                generator=generator(seed),
            )

    def draws_by_slice(self) -> bool:
        """Whether a batch has random numbers that depend on where the rank's slice begins in it."""
        return self.slices.collate_fn is None and self._draws()

    def _draws(self) -> bool:
        """Whether the data set draws random numbers; it reads one sample to find out."""
        if self.slices.are_tensors:
            return False

        def read() -> None:
            try:
                # A copy, because a data set may count what it reads, and the run does not use this
                # sample.
                copy.copy(self.dataset)[0 if self.slices.collate_fn else torch.tensor([0])]
            except RunError:
                # A store that did not answer for minutes will not answer the first batch either.
                raise
            except Exception:
                # Anything else is an error of the first batch too, which says more about it.
                pass

        return draws(read)

    def __iter__(self) -> Iterator[Any]:
        # This is a generator, so the order is looked up when the first batch is read. Lightning
        # makes the iterator earlier, before it has restored the state of the run.
        number = (len(self) - self.order.first_batch) * len(self.order.own)
        # A wrong draws_random_numbers would be silent: other numbers after each interruption.
        if not self.slices.are_seeded and self._draws():
            raise ConfigError(
                f"{type(self.dataset).__name__}.draws_random_numbers is False, but it draws some, "
                "which would not be the same after an interruption; leave this attribute out"
            )
        if self.num_threads:
            batches = self._read_ahead()
        elif self.workers is not None:
            batches = iter(self.workers)
        else:
            batches = map(self.slices.__getitem__, self._expected())
        for _ in range(number):
            yield next(batches)

    def _expected(self) -> Iterator[Slice]:
        """The slices in their order; a data set that reads blocks is told of each in advance."""
        num_ahead = self._num_batches_ahead()
        if num_ahead is None:
            yield from self.order
            return
        blocks = self.shuffle
        assert isinstance(blocks, Blocks)
        waiting: deque[Slice] = deque()
        try:
            for place in self.order:
                # The data set reads the blocks of this slice while the slices before it, which wait
                # here, are used.
                self.dataset.expect(place.ids, blocks.size)
                waiting.append(place)
                if len(waiting) > num_ahead:
                    yield waiting.popleft()
            yield from waiting
        except GeneratorExit:
            # The pass ends early, and would leave blocks in memory that no batch will use.
            self.dataset.forget()
            raise

    def _num_batches_ahead(self) -> int | None:
        """How many batches in advance blocks are read; None if the data set reads single rows."""
        blocks, order = self.shuffle, self.order
        if not isinstance(blocks, Blocks) or not hasattr(self.dataset, "expect"):
            return None
        # The samples of a window of blocks are shuffled together and dealt to all ranks. So
        # each rank reads every block, and uses one world_size-th of it: too little on many ranks.
        if order.world_size > 2:
            return None
        # In memory are the window in use and the blocks that are read ahead: a second window, or
        # more from a store, whose latency is longer. If that does not fit, a second window.
        for num_blocks in (max(blocks.at_once, self.dataset.blocks_ahead), blocks.at_once):
            if self.dataset.can_hold((blocks.at_once + num_blocks) * blocks.size):
                num_samples = num_blocks * blocks.size
                return num_samples * order.batches_per_step // order.batch_size
        return None

    def _read_ahead(self) -> Iterator[Any]:
        """The slices in their order, each read by a thread as soon as there is room for it."""
        if self._draws():
            raise ConfigError(
                f"num_threads={self.num_threads}: the data set draws random numbers, which threads "
                "would share; read ahead by num_workers, or draw after the batch is read"
            )
        order = self._expected()
        waiting: deque[Future[Any]] = deque()
        pool = ReadAheadPool(self.num_threads)
        try:
            while True:
                # Twice as many as threads: each has its next batch when it has read one, even if
                # training has not taken any meanwhile.
                for place in islice(order, 2 * self.num_threads - len(waiting)):
                    waiting.append(pool.submit(self.slices.read, place))
                if not waiting:
                    return
                # The oldest one, not the first that is read: the order is exact.
                yield waiting.popleft().result()
        finally:
            pool.close()


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
        self.are_tensors = type(dataset) is TensorDataset
        # Seeding takes 0.03 ms, which is much of a very short step.
        may_draw = getattr(dataset, "draws_random_numbers", not self.are_tensors)
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
        # In evaluation, a rank may have no sample of a short batch. What an empty batch looks like
        # is known only from one with a sample, which is cut off below.
        for id in place.ids.tolist() or [0]:
            # Not the batch: a sample gets the same numbers in whichever slice it is.
            seed(self.seed, place.epoch, id)
            samples.append(self.dataset[id])
        batch = collate_fn(samples)
        if not len(place.ids):
            batch = apply_to_collection(batch, Tensor, lambda tensor: tensor[:0])
        return batch

    def _read_batch(self, place: Slice) -> Any:
        try:
            if self.are_tensors:
                return tuple(take(tensor, place.ids) for tensor in self.dataset.tensors)
            return self.dataset[place.ids]
        except (TypeError, ValueError, LookupError, RuntimeError) as error:
            # What an ordinary data set says of a tensor, such as "invalid index", does not help.
            error.add_note(
                "BatchLoader asked for dataset[ids] with a tensor of positions. If the data set "
                "answers one position at a time, write BatchLoader(..., collate_fn=default_collate)"
            )
            raise


def take(tensor: Tensor, ids: Tensor) -> Tensor:
    """The samples ``ids`` of a tensor, which may lie on a GPU.

    Twenty times as fast as indexing, which copies number by number; and the next batch does not
    wait until the GPU has taken the steps before it.
    """
    return tensor.index_select(0, ids.to(tensor.device, non_blocking=True))


def count_samples(batch: Any) -> int:
    """Samples in a batch: the length of its first tensor."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    if not isinstance(batch, (dict, list, tuple)):
        return 0
    parts = batch.values() if isinstance(batch, dict) else batch
    for part in parts:
        num_samples = count_samples(part)
        if num_samples:
            return num_samples
    return 0
