"""Images and labels, from disk to batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from project.data import checks
from project.data.augment import Augment
from project.data.images import ImageSet
from project.data.predict import file_loader
from project.data.sources import ImageFiles, Images, Source
from samestep import BatchLoader, Blocks, ConfigError

# The same images are held out in every run, whatever its seed.
SPLIT_SEED = 7_070_836_379_803_831_727


class ImageBatches(L.LightningDataModule):
    """Batches of labelled images; a subclass opens the sets for train, val and test in ``setup``.

    Training images come in a new order each epoch and are augmented, all others are neither.

    Args:
        root: where the data are, for messages.
        num_channels, image_size, num_classes: what the images must be like; size in pixels.
        class_names: one for each class; None takes those of the data, or numbers.
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
        checks.check_sizes(num_channels, image_size, num_classes)
        checks.check_pixel_statistics(mean, std, num_channels)
        if class_names is not None:
            checks.check_class_names(class_names, num_classes)
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
        return self.loader(
            self.train_set,
            self.global_batch_size,
            shuffle=self.shuffle,
            drop_last=True,
            seed=self.seed,
            accumulate_grad_batches=self.trainer.accumulate_grad_batches if self.trainer else 1,
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
        size = self.num_channels, self.image_size
        return file_loader(self.predict_files, *size, self.predict_errors)

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


class ImageDataModule(ImageBatches):
    """A labelled image data set, split into train, val and test.

    ``val`` is ``num_val`` images drawn from the training set, the same ones in every run and on
    every rank; it is never augmented. ``test`` is the data set's own test set, untouched.

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
        num_val = checks.check_split(num_images, self.num_val, self.global_batch_size)
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
        """All official train or test images, checked against the configuration."""
        found = self.source.load(Path(self.root), train=train)
        names = checks.check_classes(found, self.num_classes, self.root)
        if isinstance(found, Images):
            checks.check_images(found, self.source, self.num_channels, self.image_size)
            if self.trainer:
                found = found.move_to_gpu(self.trainer.strategy.root_device)
        elif self.names_are_given:
            checks.check_order(self.class_names, names)
        self.learn_names(names)
        return found
