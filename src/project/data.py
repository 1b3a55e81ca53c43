"""Images and their labels, from files to batches."""

# ruff: noqa: D102  # what each hook is for: Lightning's documentation
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import lightning as L
import numpy as np
import torch
from PIL import Image, ImageOps
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import is_image_file
from torchvision.transforms.v2 import functional as F

from samestep import BatchLoader, Blocks, ConfigError, RunError, Slice, download_once

SPLIT_SEED = 7_070_836_379_803_831_727  # the same images are held out in every run


@dataclass(kw_only=True, eq=False, repr=False)
class Images(L.LightningDataModule):
    """Batches of images, uint8 ``[B, C, H, W]``, and of labels, int64 ``[B]``."""

    dataset: Callable[..., Any]  # of torchvision's form: it takes root, train and download
    root: str | None  # directory of the files
    download: bool  # whether missing files are downloaded
    mirror: str | None  # address to download from instead of the official one
    num_channels: int  # 1 is grey, 3 are colours
    image_size: int  # height and width, in pixels
    num_classes: int
    num_val: int | None  # training images held out for validation; None: a tenth
    global_batch_size: int  # images per optimizer step, over all ranks
    eval_batch_size: int  # images per validation or test batch, over all ranks
    shuffle: bool | Blocks
    num_workers: int  # processes per rank that read images from files
    mean: Sequence[float]  # of each channel, of pixels from 0 to 1; the model normalizes
    std: Sequence[float]
    crop_padding: int  # pixels by which a training image is shifted at most
    flip: bool  # whether half of the training images are mirrored
    seed: int  # of the order and the augmentation
    predict_files: Sequence[str] = field(default=(), init=False)  # `samestep predict` sets it
    class_names: list[str] | None = field(default=None, init=False)
    train_set: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__init__()

    def prepare_data(self) -> None:
        download_once(self.dataset, self.root, download=self.download, mirror=self.mirror)

    def setup(self, stage: str) -> None:
        if self.train_set is not None or stage == "predict":
            return
        train, test = (self.dataset(root=self.root, train=t, download=False) for t in (True, False))
        names = [str(name) for name in train.classes]
        if len(names) != self.num_classes or self.class_names not in (None, names):
            known = self.class_names or self.num_classes
            raise ConfigError(f"data: {self.root} has {names}, not {known}")
        self.class_names = names
        num = len(train.targets)
        num_val = max(1, num // 10) if self.num_val is None else self.num_val
        if num - num_val < self.global_batch_size:
            raise ConfigError(f"data.num_val={num_val}: leaves {num - num_val} images, no batch")
        order = torch.randperm(num, generator=torch.Generator().manual_seed(SPLIT_SEED))
        self.train_set = self.take(train, order[num_val:].sort().values)
        self.val_set = self.take(train, order[:num_val].sort().values)
        self.test_set = self.take(test, torch.arange(len(test.targets)))

    def take(self, found: Any, ids: Tensor) -> Any:
        """Some of the images: in memory, on the device of this rank, if the data set has them."""
        if not hasattr(found, "data"):
            return Subset(found, ids.tolist())
        images = torch.as_tensor(found.data)[ids]
        images = images[:, None] if images.ndim == 3 else images.movedim(3, 1)
        device = self.trainer.strategy.root_device if self.trainer else "cpu"
        labels = torch.as_tensor(found.targets)[ids].to(device, torch.int64)
        return TensorDataset(images.contiguous().to(device), labels)

    def train_dataloader(self) -> BatchLoader:
        return self.loader(
            self.train_set, self.global_batch_size, transform=self.augment, shuffle=self.shuffle,
            drop_last=True, seed=self.seed,
            accumulate_grad_batches=self.trainer.accumulate_grad_batches if self.trainer else 1,
        )  # fmt: skip

    def val_dataloader(self) -> BatchLoader:
        return self.loader(self.val_set, self.eval_batch_size)

    def test_dataloader(self) -> BatchLoader:
        return self.loader(self.test_set, self.eval_batch_size)

    def loader(self, part: Any, batch_size: int, **options: Any) -> BatchLoader:
        """Batches in an exact order; images in files are read by other processes."""
        if isinstance(part, Subset):
            options |= {"collate_fn": default_collate, "num_workers": self.num_workers}
        return BatchLoader(part, batch_size, **options)

    def augment(self, batch: list[Tensor], place: Slice) -> list[Tensor]:
        """Shift and mirror images. Each has its own random numbers, on any number of ranks."""
        images, labels = batch
        device, padding, (height, width) = images.device, self.crop_padding, images.shape[2:]
        if len(images) == 0 or not (padding or self.flip):
            return batch
        numbers = torch.rand(place.global_size, 3, generator=place.generator(self.seed))
        numbers = numbers[place.start :][: len(images)]
        mirrored = (numbers[:, 2] < 0.5 * self.flip).nonzero()[:, 0].to(device, non_blocking=True)
        shifts = (numbers[:, :2] * (2 * padding + 1)).long()
        top, left = shifts.to(device, non_blocking=True).unbind(1)
        padded = F.pad(images, [padding])
        # A row of each crop is a window into memory, which index_select copies as a whole.
        row = torch.arange(0, padded.numel(), padded.shape[3], device=device).view(padded.shape[:3])
        at = row[:, :, :height] + (top * padded.shape[3] + left)[:, None, None]
        crops = padded.flatten().unfold(0, width, 1).index_select(0, at.flatten()).view_as(images)
        return [crops.index_copy_(0, mirrored, crops.index_select(0, mirrored).flip(3)), labels]

    def predict_dataloader(self) -> DataLoader[Any]:
        """Batches of the images in the named files and folders, and of their names."""
        files: Any = []
        for name in self.predict_files:
            files += sorted(filter(is_image_file, map(str, Path(name).rglob("*")))) or [name]
        read = partial(read_image, num_channels=self.num_channels, image_size=self.image_size)
        return DataLoader(
            files, batch_size=64, collate_fn=lambda names: (torch.stack([*map(read, names)]), names)
        )

    def state_dict(self) -> dict[str, Any]:
        return {"class_names": self.class_names}  # `samestep predict` has no data to ask

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.class_names = state_dict["class_names"]


def digits(root: str | None, train: bool, download: bool) -> Any:
    """scikit-learn's 1,797 digits; 360 of them, the same in every run, are the test set."""
    found = load_digits()
    order = np.random.RandomState(0).permutation(1797)
    ids = np.sort(order[360:] if train else order[:360])
    images = (found.images[ids] * (255 / 16)).round().astype(np.uint8)  # [N, 8, 8]
    return SimpleNamespace(data=images, targets=found.target[ids], classes=[*"0123456789"])


def folder(root: str, train: bool, download: bool, num_channels: int, image_size: int) -> Any:
    """Your own images: ``train/<class>/*`` and ``test/<class>/*`` below ``root``, or ``<class>/*``.

    Without ``train`` and ``test``, the name of each file says whether it is in the test fifth.
    """
    is_divided = Path(root, "train").is_dir()
    place = Path(root, "train" if train else "test") if is_divided else root

    def is_mine(path: str) -> bool:
        in_test = zlib.crc32(Path(path).relative_to(root).as_posix().encode()) % 5 == 0
        return is_image_file(path) and (is_divided or in_test != train)

    read = partial(read_image, num_channels=num_channels, image_size=image_size)
    return ImageFolder(place, loader=read, is_valid_file=is_mine, allow_empty=True)


def read_image(path: str | IO[bytes], num_channels: int, image_size: int) -> Any:
    """uint8 ``[C, S, S]``: upright, scaled to ``S`` on the short side, cropped at the centre."""
    mode = "L" if num_channels == 1 else "RGB"
    try:
        with Image.open(path) as file:
            file.draft(mode, (image_size, image_size))  # decodes large JPEGs at a smaller scale
            image = F.pil_to_tensor(ImageOps.exif_transpose(file).convert(mode))
    except Exception as error:  # each format has errors of its own
        raise RunError(f"{path} cannot be read: {error}") from error
    return F.center_crop(F.resize(image, image_size, antialias=True), image_size)
