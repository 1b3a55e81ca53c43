"""The data of the skeleton in loaders of other people's styles, for runs of ``train.py``."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from project.skeleton import SkeletonData, SkeletonModel
from samestep.ranks import environment


class Buckets:
    """A batch sampler that is no ``BatchSampler`` of torch, and draws while it gives batches."""

    def __init__(self, num: int, size: int) -> None:
        self.num, self.size = num, size

    def __len__(self) -> int:
        return self.num // self.size

    def __iter__(self) -> Iterator[list[int]]:
        left = list(range(self.num))
        for _ in range(len(self)):
            chosen = [left.pop(int(torch.randint(len(left), ()))) for _ in range(self.size)]
            yield chosen


class BatchSamplers(SkeletonData):
    """Batch samplers: of torch, and other ones."""

    is_own = False

    def train_dataloader(self) -> Any:
        num, size = len(self.train), self.global_batch_size
        torchs = BatchSampler(RandomSampler(self.train), size, drop_last=False)
        sampler = Buckets(num, size) if self.is_own else torchs
        return DataLoader(self.train, batch_sampler=sampler)

    def val_dataloader(self) -> Any:
        sampler = BatchSampler(SequentialSampler(self.val), 20, drop_last=False)
        return DataLoader(self.val, batch_sampler=sampler)


class OwnBatchSamplers(BatchSamplers):
    is_own = True


class StatefulLoader:
    """Each rank reads its share in an order of its own, which its state continues."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.generator = torch.Generator().manual_seed(environment.rank())
        self.left: list[int] = []

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Any]:
        self.left = self.left or torch.randperm(10, generator=self.generator).tolist()
        while self.left:
            start = 30 * self.left.pop() + 15 * environment.rank()
            yield self.data[torch.arange(start, start + 15)]

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = list(state["left"])
        self.generator.set_state(state["generator"])


class Stateful(SkeletonData):
    def train_dataloader(self) -> Any:
        return StatefulLoader(self.train)


Plain = SkeletonData


class Thaws(SkeletonModel):
    """Trains its first layer from epoch 1 on, or until then."""

    def __init__(self, freezes: bool, **options: Any) -> None:
        super().__init__(**options)
        self.freezes = freezes
        self.set_first(freezes)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.set_first(not self.freezes)

    def set_first(self, is_trained: bool) -> None:
        for parameter in next(self.net.children()).parameters():
            parameter.requires_grad_(is_trained)
