"""Images and labels, from disk to batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from project.data.augment import Augment
from project.data.download import DataError
from project.data.images import FileBatch, ImageSet
from project.data.sources import (
    ImageFiles,
    Images,
    Source,
    find_images,
    read_image,
)
from samestep import BatchLoader, Blocks, ConfigError

# The same images are held out in every run, whatever its seed.
SPLIT_SEED = 7_070_836_379_803_831_727
MEMORY_SHARE = 0.25  # of the accelerator's free memory that the images may take


class ImageBatches(L.LightningDataModule):
    """Batches of labelled images; a subclass opens the sets for train, val and test in ``setup``.

    Training images come in a new order each epoch and are augmented, all others are neither.

    Args:
        root: where the data are, for messages.
        num_channels, image_size, num_classes: what the images must be like; size in pixels.
        class_names: one for each class; None takes those of the data, if they have any, otherwise
            numbers the classes.
        global_batch_size: images per optimizer step, over all ranks.
        eval_batch_size: images per validation or test batch, over all ranks.
        shuffle: draw a new order of the training images each epoch; ``Blocks`` reads neighbours
            together.
        mean, std: of each channel, in units of pixel values scaled to ``[0, 1]``: facts of the
            data, with which a model normalizes them.
        crop_padding, flip: see ``Augment``.
        seed: of the order and the augmentation.
    """

    train_set: Any = None
    val_set: Any
    test_set: Any

    def __init__(
        self,
        *,
        root: str,
        num_channels: int,
        image_size: int,
        num_classes: int,
        class_names: Sequence[str] | None,
        global_batch_size: int,
        eval_batch_size: int,
        shuffle: bool | Blocks,
        mean: Sequence[float],
        std: Sequence[float],
        crop_padding: int,
        flip: bool,
        seed: int,
    ) -> None:
        super().__init__()
        check_length("mean", mean, num_channels)
        check_length("std", std, num_channels)
        if class_names is not None:
            check_length("class_names", class_names, num_classes)
            if len(set(class_names)) < num_classes:
                raise ValueError(f"class_names={list(class_names)}: each must be another name")
        if min(std) <= 0:
            raise ValueError(f"std={list(std)}: must be numbers above 0")
        if num_channels < 1 or image_size < 1 or num_classes < 2 or crop_padding < 0:
            raise ValueError(
                "num_channels, image_size and num_classes must be at least 1, 1 and 2, and "
                "crop_padding at least 0"
            )
        self.root = root
        self.num_channels = num_channels
        self.image_size = image_size
        self.num_classes = num_classes
        self.class_names = [str(name) for name in class_names or []]
        self.names_are_given = class_names is not None
        self.global_batch_size = global_batch_size
        self.eval_batch_size = eval_batch_size
        self.shuffle = shuffle
        self.mean = list(mean)
        self.std = list(std)
        self.seed = seed
        self.augment = Augment(crop_padding=crop_padding, flip=flip, seed=seed)
        self.predict_files: list[str] = []
        """Files and folders of images that ``samestep predict`` names."""
        self.predict_errors: list[str] = []
        """Why some of them cannot be predicted; ``samestep predict`` prints it."""

    def train_dataloader(self) -> BatchLoader:
        """Training batches, in a new order each epoch."""
        assert self.train_set is not None, "setup() comes first"
        return self.loader(
            self.train_set,
            self.global_batch_size,
            shuffle=self.shuffle,
            drop_last=True,
            seed=self.seed,
            accumulate_grad_batches=self.batches_per_step(),
            transform=self.augment,
        )

    def val_dataloader(self) -> BatchLoader:
        """Validation batches, in a fixed order."""
        return self.loader(self.val_set, self.eval_batch_size)

    def test_dataloader(self) -> BatchLoader:
        """Test batches, in a fixed order."""
        return self.loader(self.test_set, self.eval_batch_size)

    def predict_dataloader(self) -> DataLoader[Any]:
        """The images in ``predict_files``, prepared like those of ``data=folder``."""
        if not self.predict_files:
            raise ConfigError("there is nothing to predict; name image files, or folders of them")
        files: Any = find_images(self.predict_files)
        return DataLoader(files, batch_size=64, collate_fn=self.read_files)

    def read_files(self, files: Sequence[Path]) -> FileBatch:
        """Read image files; those that cannot be read are left out."""
        images, names = [], []
        for file in files:
            try:
                images.append(read_image(file, self.num_channels, self.image_size))
            except DataError as error:
                self.predict_errors.append(str(error))
            else:
                names.append(str(file))
        # torch.stack takes no empty list, and none of these files may be readable.
        shape = 0, self.num_channels, self.image_size, self.image_size
        none = torch.empty(shape, dtype=torch.uint8)
        return FileBatch(torch.cat([none, *(image[None] for image in images)]), names)

    def loader(self, images: Any, batch_size: int, **options: Any) -> BatchLoader:
        """Batches in an exact order; a subclass may read them ahead."""
        return BatchLoader(images, batch_size, **options)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the names of the classes, which the data may have given."""
        return {"class_names": self.class_names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the names of the classes from a checkpoint, before or after ``setup``."""
        self.learn_names(state_dict["class_names"])

    def learn_names(self, names: list[str]) -> None:
        """Take the names of the data or of a checkpoint, whichever comes first."""
        if self.names_are_given:
            return
        if self.class_names and names != self.class_names:
            raise ConfigError(
                f"data.root={self.root}: the model knows the classes {self.class_names}, "
                f"and not {names}"
            )
        self.class_names = names

    def batches_per_step(self) -> int:
        """Into how many batches the trainer cuts an optimizer step."""
        return self.trainer.accumulate_grad_batches if self.trainer else 1


def check_length(name: str, values: Sequence[object], count: int) -> None:
    """Raise a ValueError if there is not one value for each channel or class."""
    if len(values) != count:
        raise ValueError(f"{name}={list(values)}: must have {count} values")


class ImageDataModule(ImageBatches):
    """A labelled image data set, split into train, val and test.

    ``val`` is ``num_val`` images drawn from the training set, the same ones in every run and on
    every rank; it is never augmented. ``test`` is the data set's own test set, untouched.

    Images that fit in memory are kept there as bytes, on the accelerator if they take less than a
    quarter of its free memory. Whole batches are gathered and augmented at once.

    Args:
        source: where the images come from.
        root: directory of all data sets.
        download: fetch missing files. False: missing files are an error.
        mirror: address to fetch from instead of the official one.
        num_val: training images held out for validation; None: a tenth of them.
        num_workers: loader processes per rank, for images that are read from files.
        images: the arguments of ``ImageBatches``.

    Raises:
        ConfigError: at ``setup``, if the configuration does not describe the images that were
            found, or there are too few of them.
        DataError: at ``prepare_data``, if files are missing or damaged.
    """

    def __init__(
        self,
        *,
        source: Source,
        root: str,
        download: bool,
        mirror: str | None,
        num_val: int | None,
        num_workers: int,
        **images: Any,
    ) -> None:
        super().__init__(root=root, **images)
        if num_workers < 0:
            raise ValueError(f"num_workers={num_workers}: must be at least 0")
        self.source = source
        self.download = download
        self.mirror = mirror
        self.num_val = num_val
        self.num_workers = num_workers
        self.is_prepared = False

    def prepare_data(self) -> None:
        """Make the files present and verified, once. Lightning calls this once per node."""
        if not self.is_prepared:
            self.source.prepare(Path(self.root), download=self.download, mirror=self.mirror)
        self.is_prepared = True

    def setup(self, stage: str) -> None:
        """Open and split the data set, once. Lightning calls this on every rank and stage."""
        if self.train_set is not None or stage == "predict":
            return
        train, test = self._load(train=True), self._load(train=False)
        num_images = len(train.labels)
        num_val = max(1, num_images // 10) if self.num_val is None else self.num_val
        if not (num_val > 0 and self.global_batch_size <= num_images - num_val):
            keys = {"num_val": self.num_val, "global_batch_size": self.global_batch_size}
            now = ", ".join(f"data.{key}={value}" for key, value in keys.items() if value)
            tenth = max(1, num_images // 10)
            fits = max(1, min(self.global_batch_size, (num_images - tenth) // 4))
            raise ConfigError(
                f"{now}: is too much for {num_images} training images; add data.num_val={tenth} "
                f"data.global_batch_size={fits}"
            )
        order = torch.randperm(num_images, generator=torch.Generator().manual_seed(SPLIT_SEED))
        kinds = {"num_channels": self.num_channels, "image_size": self.image_size}
        self.train_set = ImageSet(train, order[num_val:].sort().values, **kinds)
        self.val_set = ImageSet(train, order[:num_val].sort().values, **kinds)
        self.test_set = ImageSet(test, torch.arange(len(test.labels)), **kinds)

    def loader(self, images: ImageSet, batch_size: int, **options: Any) -> BatchLoader:
        """Images in files are read by other processes."""
        num_workers = self.num_workers if isinstance(images.source, ImageFiles) else 0
        return super().loader(images, batch_size, num_workers=num_workers, **options)

    def shared_memory_bytes(self) -> int:
        """Bytes that the loader processes of one rank hold in /dev/shm: two batches each."""
        assert self.trainer is not None
        images = max(self.global_batch_size, self.eval_batch_size) / self.trainer.world_size
        return round(2 * images * self.num_channels * self.image_size**2 * self.num_workers)

    def _load(self, *, train: bool) -> Images | ImageFiles:
        """All official train or test images, checked against the configuration.

        Images in memory move to the GPU of this rank, if they take little of its memory.
        """
        found = self.source.load(Path(self.root), train=train)
        num_classes = int(found.labels.max()) + 1
        names = [str(number) for number in range(self.num_classes)]
        if isinstance(found, ImageFiles):
            names, num_classes = found.classes, len(found.classes)
        if num_classes > self.num_classes or len(names) != self.num_classes:
            raise ConfigError(
                f"data.num_classes={self.num_classes}: {num_classes} classes were found in "
                f"{self.root}"
            )
        if isinstance(found, ImageFiles):
            if self.names_are_given and self.class_names != names == sorted(self.class_names):
                raise ConfigError(
                    f"data.class_names={self.class_names}: must be in the order of the labels, "
                    f"{names}"
                )
        else:
            found = self._check_images(found)
        self.learn_names(names)
        return found

    def _check_images(self, found: Images) -> Images:
        images, labels = found
        shape = [self.num_channels, self.image_size, self.image_size]
        if images.dtype != torch.uint8 or labels.dtype != torch.int64 or len(images) != len(labels):
            raise ConfigError(
                f"data.source: {type(self.source).__name__}.load must return images uint8 "
                "[N, C, H, W], from 0 to 255, and as many labels int64 [N]; it returned images "
                f"{images.dtype} {[*images.shape]} and labels {labels.dtype} {[*labels.shape]}"
            )
        if list(images.shape[1:]) != shape:
            raise ConfigError(
                f"data.num_channels={self.num_channels}, data.image_size={self.image_size}: "
                f"the images found have the shape {list(images.shape[1:])}"
            )
        device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if images.nbytes < MEMORY_SHARE * free:
                return Images(images.to(device), labels.to(device))
        return found
