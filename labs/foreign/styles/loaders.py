"""Where the samples come from."""

import random
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from samestep.data.loader import BatchLoader
from samestep.verify import known_notes

from .base import LOADER, LOST, STREAM, Exact, Plain, Regressor, Style, table


class Boring(Regressor):
    """Loaders in the module."""

    def train_dataloader(self):
        return DataLoader(table(36, 0), batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(table(16, 1), batch_size=4)

    def test_dataloader(self):
        return DataLoader(table(16, 1), batch_size=4)


class Noisy(Dataset):
    """A transform for each sample, as torchvision's v1 transforms are used."""

    def __init__(self, rows: Dataset):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        x, y = self.rows[index]
        return x + 0.1 * torch.randn_like(x) + 0.1 * np.random.rand() + 0.1 * random.random(), y


class NoisyPlain(Plain):
    def setup(self, stage: str):
        super().setup(stage)
        self.train = Noisy(self.train)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=4, shuffle=True, num_workers=1)


class NoisyExact(Exact):
    """A transform of a whole batch."""

    workers = 0

    def setup(self, stage: str):
        super().setup(stage)
        self.train = Noisy(self.train)

    def train_dataloader(self):
        return BatchLoader(self.train, 4, shuffle=True, drop_last=True, num_workers=self.workers)


class NoisyWorkers(NoisyExact):
    workers = 2


class Autoencoder(Regressor):
    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 5))

    def loss(self, batch):
        x, _ = batch
        return F.mse_loss(self.net(x), x)


class Replay(IterableDataset):
    def __init__(self, memory: list[torch.Tensor]):
        self.memory = memory

    def __iter__(self):
        for _ in range(36):
            yield random.choice(self.memory)


class Sampled(Regressor):
    def loss(self, batch):
        if isinstance(batch, torch.Tensor):
            return F.mse_loss(self.net(batch), batch.square().sum(1, keepdim=True))
        return super().loss(batch)


class DQN(L.LightningModule):
    """Plays a step of a made-up game before each step of the optimizer."""

    def __init__(self):
        super().__init__()
        self.net, self.target = nn.Linear(4, 2), nn.Linear(4, 2)
        self.memory = [torch.rand(5) for _ in range(20)]

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            best = self.target(batch[:, :4]).max(1).values
        self.memory.append(torch.cat([batch[0, 1:], self.net(batch[0, :4]).detach()[:1]]))
        if self.global_step % 5 == 0:
            self.target.load_state_dict(self.net.state_dict())
        loss = F.mse_loss(self.net(batch[:, :4]).max(1).values, batch[:, 4] + 0.9 * best)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=0.01)

    def train_dataloader(self):
        return DataLoader(Replay(self.memory), batch_size=4)


class Stateful(DataLoader):
    """As torchdata's StatefulDataLoader: it says how far it has come, and begins there."""

    done = first = 0

    def __iter__(self):
        first, self.first, self.done = self.first, 0, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= first:
                self.done = number + 1
                yield batch
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done % len(self)}

    def load_state_dict(self, state: dict[str, int]):
        self.first = state["done"]


class StatefulData(Plain):
    def train_dataloader(self):
        return Stateful(self.train, batch_size=4)


class Streaming(IterableDataset):
    """As litdata's StreamingDataset: an order of its own for each pass, and a length."""

    def __init__(self, rows: Dataset):
        self.rows, self.epoch = rows, 0

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        order = np.random.RandomState(self.epoch).permutation(len(self.rows))
        self.epoch += 1
        yield from (self.rows[index] for index in order)


class StreamingLoader(Stateful):
    """The pass is a part of the state, too."""

    def state_dict(self) -> dict[str, int]:
        is_within = 0 < self.done < len(self)
        return {"done": self.done % len(self), "epoch": self.dataset.epoch - is_within}

    def load_state_dict(self, state: dict[str, int]):
        self.first, self.dataset.epoch = state["done"], state["epoch"]


class StreamingData(Plain):
    def train_dataloader(self):
        return StreamingLoader(Streaming(self.train), batch_size=4)


class SizedStream(Plain):
    def train_dataloader(self):
        return DataLoader(Streaming(self.train), batch_size=4)


class Rows(IterableDataset):
    def __init__(self, rows: Dataset):
        self.rows = rows

    def __iter__(self):
        return (self.rows[index] for index in range(len(self.rows)))


class Stream(Plain):
    def train_dataloader(self):
        return DataLoader(Rows(self.train), batch_size=4)


class NoisyStream(Plain):
    def train_dataloader(self):
        return DataLoader(Replay([row[0] for row in self.train]), batch_size=4, num_workers=2)


class Fast:
    """A loader of one's own, for data in memory."""

    def __init__(self, rows: Dataset, batch_size: int):
        self.rows, self.batch_size = rows, batch_size

    def __len__(self):
        return len(self.rows) // self.batch_size

    def __iter__(self):
        for ids in torch.randperm(len(self.rows)).split(self.batch_size):
            yield self.rows[ids]


class FastData(Plain):
    def train_dataloader(self):
        return Fast(self.train, 4)


class Several(Exact):
    mode: str | None = None

    def train_dataloader(self):
        a = super().train_dataloader()
        b = BatchLoader(self.val, 2, shuffle=True, drop_last=True, seed=5)
        return CombinedLoader({"a": a, "b": b}, self.mode) if self.mode else {"a": a, "b": b}


class Shortest(Several):
    mode = "min_size"


class SeveralPlain(Plain):
    def train_dataloader(self):
        a, b = super().train_dataloader(), DataLoader(self.val, batch_size=2, shuffle=True)
        return CombinedLoader({"a": a, "b": b}, "max_size")


class FromSeveral(Regressor):
    def training_step(self, batch, batch_idx):
        return sum(self.loss(part) for part in batch.values() if part is not None)


class SeveralVal(Exact):
    def val_dataloader(self):
        return [DataLoader(self.val, batch_size=4), DataLoader(self.train, batch_size=4)]


class ValidatesSeveral(Regressor):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch[0]))


class Buckets(Sampler):
    """Batches of neighbours, in a random order."""

    def __len__(self):
        return 9

    def __iter__(self):
        for start in torch.randperm(9).tolist():
            yield list(range(4 * start, 4 * start + 4))


class BucketData(Plain):
    def train_dataloader(self):
        return DataLoader(self.train, batch_sampler=Buckets())


class TorchBatchSampler(Plain):
    def train_dataloader(self):
        sampler = BatchSampler(RandomSampler(self.train), batch_size=4, drop_last=True)
        return DataLoader(self.train, batch_sampler=sampler)


class Weighted(Plain):
    def train_dataloader(self):
        sampler = WeightedRandomSampler(torch.arange(1.0, 37.0), 36)
        return DataLoader(self.train, batch_size=4, sampler=sampler)


class OwnGenerator(Plain):
    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(self.train, batch_size=4, shuffle=True, generator=generator)


RANDOM = (known_notes.RANDOM_TRANSFORMS,)
STYLES = [
    Style("DataLoader", Regressor, Plain, told=LOADER),
    Style("BatchLoader in a foreign DataModule", Regressor, Exact),
    Style("loaders in the module (data=null)", Boring, None, told=LOADER),
    Style("autoencoder, random transforms, 1 worker", Autoencoder, NoisyPlain, told=LOADER),
    Style("random transforms behind BatchLoader", Autoencoder, NoisyExact, told=RANDOM),
    Style("the same with 2 workers", Autoencoder, NoisyWorkers, told=RANDOM),
    Style("DQN: a stream over a replay buffer", DQN, None, (
        "callbacks.checkpoints.monitor=loss", "trainer.strategy=ddp_find_unused_parameters_true",
    ), STREAM + LOST),
    Style("loader with a state of its own", Regressor, StatefulData, told=STREAM),
    Style("stream with a state of its own", Regressor, StreamingData, told=STREAM),
    Style("stream that counts its passes", Regressor, SizedStream, told=LOST + STREAM),
    Style("IterableDataset without a length", Regressor, Stream, told=STREAM),
    Style("stream that samples, 2 workers", Sampled, NoisyStream, told=STREAM),
    Style("loader of one's own", Regressor, FastData, told=STREAM),
    Style("dictionary of BatchLoaders", FromSeveral, Several),
    Style("CombinedLoader min_size of BatchLoaders", FromSeveral, Shortest),
    Style("CombinedLoader max_size of DataLoaders", FromSeveral, SeveralPlain, told=LOADER),
    Style("several validation loaders", ValidatesSeveral, SeveralVal, (
        "callbacks.checkpoints.monitor=val_loss/dataloader_idx_0",
    )),
    Style("custom batch sampler", Regressor, BucketData, told=LOADER),
    Style("torch BatchSampler", Regressor, TorchBatchSampler, told=LOADER),
    Style("WeightedRandomSampler", Regressor, Weighted, told=LOADER),
    Style("DataLoader with a generator", Regressor, OwnGenerator, told=LOADER),
    Style("accumulate_grad_batches, DataLoader", Regressor, Plain, (
        "trainer.accumulate_grad_batches=3",
    ), LOADER),
    Style("accumulate_grad_batches, BatchLoader", Regressor, Exact, (
        "trainer.accumulate_grad_batches=3",
    )),
]  # fmt: skip
