"""DataModules as the documentation of each library writes them: 9 batches an epoch."""

from pathlib import Path

import datasets
import lightning as L
import litdata
import monai.data
import torch
import webdataset
from litdata.streaming.cache import Cache
from monai import transforms
from torch.utils.data import DataLoader, TensorDataset, default_collate, random_split
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as GraphLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchvision.transforms import v2

from samestep.data.loader import BatchLoader

from ..base import Plain, table


def pictures(rows: int, seed: int) -> torch.Tensor:
    """``[rows, 1, 16, 16]`` between 0 and 1."""
    return torch.rand(rows, 1, 16, 16, generator=torch.Generator().manual_seed(seed))


class LitData(Plain):
    """Two folders of chunks, which are streamed in an order of their own."""

    num_workers = 0

    def prepare_data(self):
        for name, rows in ("train", table(36, 0)), ("val", table(16, 1)):
            folder = self.folder(name)
            if (folder / "index.json").exists():
                continue
            folder.mkdir(parents=True, exist_ok=True)
            cache = Cache(str(folder), chunk_size=6)
            for number in range(len(rows)):
                cache[number] = rows[number]
            cache.done()
            cache.merge()

    def folder(self, name: str) -> Path:
        return Path("data", type(self).__name__, name)

    def train_dataloader(self):
        rows = litdata.StreamingDataset(str(self.folder("train")), shuffle=True, drop_last=True)
        return litdata.StreamingDataLoader(rows, batch_size=4, num_workers=self.num_workers)

    def val_dataloader(self):
        rows = litdata.StreamingDataset(str(self.folder("val")))
        return litdata.StreamingDataLoader(rows, batch_size=4)


class LitDataWorkers(LitData):
    num_workers = 2


class TorchData(Plain):
    num_workers = 0

    def train_dataloader(self):
        return StatefulDataLoader(
            self.train, batch_size=4, shuffle=True, num_workers=self.num_workers
        )


class TorchDataWorkers(TorchData):
    num_workers = 2


class HuggingFace(Plain):
    """Rows of Arrow files, as torch's tensors."""

    def setup(self, stage: str):
        self.train, self.val = self.rows(36, 0), self.rows(16, 1)

    def rows(self, rows: int, seed: int) -> datasets.Dataset:
        x, y = table(rows, seed).tensors
        return datasets.Dataset.from_dict({"x": x.numpy(), "y": y.numpy()}).with_format("torch")


class HuggingFaceStream(HuggingFace):
    """A stream with a buffer in which it is shuffled."""

    def stream(self) -> datasets.IterableDataset:
        return self.train.to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=10)

    def train_dataloader(self):
        return DataLoader(self.stream(), batch_size=4)


class HuggingFaceBuffer(HuggingFaceStream):
    """In a loader that asks the stream for its state, which does not hold the buffer."""

    def train_dataloader(self):
        return StatefulDataLoader(self.stream(), batch_size=4)


class HuggingFaceStateful(HuggingFaceBuffer):
    """The same without a buffer."""

    def stream(self) -> datasets.IterableDataset:
        return self.train.to_iterable_dataset(num_shards=3)


class Web(Plain):
    """Tar files, one after the other for each rank; samples are shuffled in a buffer."""

    def prepare_data(self):
        rows = table(36, 0)
        for shard in range(4):
            path = self.path(shard)
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with webdataset.TarWriter(str(path)) as writer:
                for number in range(shard, 36, 4):
                    x, y = rows[number]
                    writer.write({"__key__": f"{number:03}", "x.pth": x, "y.pth": y})

    def path(self, shard: int) -> Path:
        return Path("data", "web", f"{shard}.tar")

    def train_dataloader(self):
        paths = [str(self.path(shard)) for shard in range(4)]
        rows = webdataset.WebDataset(
            paths, shardshuffle=False, nodesplitter=webdataset.split_by_node
        )
        rows = rows.compose(webdataset.detshuffle(10, seed=1)).decode()
        rows = rows.to_tuple("x.pth", "y.pth").batched(4, partial=False)
        return webdataset.WebLoader(rows, batch_size=None)


class Geometric(L.LightningDataModule):
    """Graphs of different sizes."""

    def setup(self, stage: str):
        graphs = [self.graph(seed) for seed in range(52)]
        self.train, self.val = graphs[:36], graphs[36:]

    def graph(self, seed: int) -> Data:
        draw = torch.Generator().manual_seed(seed)
        nodes = 3 + seed % 4
        x = torch.randn(nodes, 5, generator=draw)
        edges = torch.randint(nodes, (2, 2 * nodes), generator=draw)
        return Data(x=x, edge_index=edges, y=x.square().mean().reshape(1, 1))

    def train_dataloader(self):
        return GraphLoader(self.train, batch_size=4, shuffle=True)

    def val_dataloader(self):
        return GraphLoader(self.val, batch_size=4)

    def test_dataloader(self):
        return GraphLoader(self.val, batch_size=4)


class Monai(L.LightningDataModule):
    """Dictionaries, a cache behind the transforms that are not random, and those that are."""

    def setup(self, stage: str):
        fixed = [transforms.ScaleIntensityd("image")]
        random = [
            transforms.RandFlipd(["image", "label"], prob=0.5, spatial_axis=0),
            transforms.RandGaussianNoised("image", prob=0.5),
        ]
        self.train = monai.data.CacheDataset(
            self.rows(36, 0), transforms.Compose([*fixed, *random]), progress=False, num_workers=1
        )
        self.val = monai.data.Dataset(self.rows(16, 1), transforms.Compose(fixed))

    def rows(self, rows: int, seed: int) -> list[dict[str, monai.data.MetaTensor]]:
        found = []
        for picture in pictures(rows, seed):
            label = monai.data.MetaTensor((picture > 0.5).float())
            found.append({"image": monai.data.MetaTensor(picture), "label": label})
        return found

    def train_dataloader(self):
        return monai.data.DataLoader(self.train, batch_size=4, shuffle=True)

    def val_dataloader(self):
        return monai.data.DataLoader(self.val, batch_size=4)

    def test_dataloader(self):
        return self.val_dataloader()


class MonaiWorkers(Monai):
    def train_dataloader(self):
        return monai.data.DataLoader(self.train, batch_size=4, shuffle=True, num_workers=2)


class MixedUp(Plain):
    """torchvision's recipe: random transforms, and MixUp or CutMix of a batch in collate_fn."""

    def setup(self, stage: str):
        labels = torch.arange(36) % 3
        self.train = [*zip(pictures(36, 0), labels, strict=True)]
        self.val = [*zip(pictures(16, 1), labels[:16], strict=True)]
        self.mix = v2.RandomChoice([v2.MixUp(num_classes=3), v2.CutMix(num_classes=3)])
        self.transform = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(16, padding=2)])

    def collate(self, rows):
        rows = [(self.transform(picture), label) for picture, label in rows]
        return self.mix(*default_collate(rows))

    def train_dataloader(self):
        return DataLoader(self.train, 4, shuffle=True, num_workers=2, collate_fn=self.collate)


class InOrder(Plain):
    """Tables for the models of a library, in a BatchLoader: what differs is the model's."""

    def setup(self, stage: str):
        self.train, self.val = self.rows(72, 0), self.rows(16, 1)

    def train_dataloader(self):
        return BatchLoader(self.train, 8, shuffle=True, drop_last=True, seed=7)


class Tokens(InOrder):
    """6 of 20 tokens, and which of 2 kinds they are."""

    def rows(self, rows: int, seed: int) -> TensorDataset:
        draw = torch.Generator().manual_seed(seed)
        tokens = torch.randint(20, (rows, 6), generator=draw)
        return TensorDataset(tokens, (tokens.sum(1) > 57).long())


class Pictures(InOrder):
    def rows(self, rows: int, seed: int) -> TensorDataset:
        return TensorDataset(pictures(rows, seed), torch.arange(rows) % 3)


class Masks(InOrder):
    def rows(self, rows: int, seed: int) -> TensorDataset:
        masks = pictures(rows, seed).repeat_interleave(2, 2).repeat_interleave(2, 3)
        return TensorDataset(masks, (masks > 0.5).float())


class Divided(L.LightningDataModule):
    """As that of the common Hydra template: it divides the batch by the ranks itself."""

    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.data_train = self.data_val = None
        self.batch_size_per_device = batch_size

    def setup(self, stage: str | None = None):
        if self.trainer is not None:
            if self.hparams.batch_size % self.trainer.world_size != 0:
                raise RuntimeError("the batch size is not divisible by the number of devices")
            self.batch_size_per_device = self.hparams.batch_size // self.trainer.world_size
        if not self.data_train:
            self.data_train, self.data_val = random_split(
                table(52, 0), [36, 16], generator=torch.Generator().manual_seed(42)
            )

    def train_dataloader(self):
        return DataLoader(self.data_train, batch_size=self.batch_size_per_device, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data_val, batch_size=self.batch_size_per_device)

    def test_dataloader(self):
        return self.val_dataloader()
