"""Images and labels, from disk to batches on the device."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import lightning as L
import torch
from torch import Tensor

from project.data.augment import Augment, Normalize
from project.data.images import Batch, ImageSet, RawBatch
from project.data.sources import ImageFiles, Images, Source
from samestep.callbacks.last_checkpoint import LastCheckpoint
from samestep.data.loader import BatchLoader
from samestep.data.sampler import GlobalBatchSampler, generator
from samestep.errors import ConfigError

__all__ = ["Batch", "ImageDataModule"]

SPLIT_SEED = 0  # the same images are held out in every run, whatever its seed
MEMORY_SHARE = 0.25  # of the accelerator's free memory that the images may take


class ImageDataModule(L.LightningDataModule):
    """A labelled image data set, split into train, val and test.

    ``val`` is ``num_val`` images drawn from the training set, the same ones in every run and on
    every rank; it is never augmented. ``test`` is the data set's own test set, untouched.

    Images that fit in memory are kept there as bytes, on the accelerator if they take less than a
    quarter of its free memory. Whole batches are gathered, augmented and normalized at once.

    Args:
        source: where the images come from.
        root: directory of all data sets.
        download: fetch missing files; else they are an error.
        mirror: address to fetch from instead of the official one.
        num_channels, image_size, num_classes: what the images must be like; size in pixels.
        class_names: one for each class; None takes those of the source.
        num_val: training images held out for validation.
        global_batch_size: images per optimizer step, over all ranks.
        eval_batch_size: images per validation or test batch, over all ranks.
        num_workers: loader processes per rank, for images that are read from files.
        shuffle: draw a new order of the training images each epoch.
        mean, std: see ``Normalize``.
        crop_padding, flip: see ``Augment``.
        seed: of the order and the augmentation.

    Raises:
        ConfigError: at ``setup``, if ``global_batch_size`` does not divide over the ranks, or the
            configuration does not describe the images that were found.
        DataError: at ``prepare_data``, if files are missing or damaged.
    """

    def __init__(
        self,
        *,
        source: Source,
        root: str,
        download: bool,
        mirror: str | None,
        num_channels: int,
        image_size: int,
        num_classes: int,
        class_names: Sequence[str] | None,
        num_val: int,
        global_batch_size: int,
        eval_batch_size: int,
        num_workers: int,
        shuffle: bool,
        mean: Sequence[float],
        std: Sequence[float],
        crop_padding: int,
        flip: bool,
        seed: int,
    ) -> None:
        super().__init__()
        self.source = source
        self.root = Path(root)
        self.download = download
        self.mirror = mirror
        self.num_channels = num_channels
        self.image_size = image_size
        self.num_classes = num_classes
        self.class_names = [str(name) for name in class_names or range(num_classes)]
        self.takes_names_of_source = class_names is None
        self.names_are_known = False  # from the source, or from a checkpoint
        self.num_val = num_val
        self.global_batch_size = global_batch_size
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.shuffle = shuffle
        self.mean = list(mean)
        self.std = list(std)
        self.normalize = Normalize(self.mean, self.std)
        self.seed = seed
        self.augment = Augment(crop_padding=crop_padding, flip=flip, seed=seed)
        self.train_set: ImageSet | None = None

    def prepare_data(self) -> None:
        """Make the files present and verified. Lightning calls this once per node."""
        self.source.prepare(self.root, download=self.download, mirror=self.mirror)

    def setup(self, stage: str) -> None:
        """Open and split the data set, once. Lightning calls this on every rank and stage."""
        if self.trainer:
            self.check_batch_size(self.trainer.world_size, self.trainer.accumulate_grad_batches)
        if self.train_set is not None:
            return
        train, test = self._load(train=True), self._load(train=False)
        if not 0 < self.num_val < len(train.labels):
            raise ConfigError(
                f"data.num_val={self.num_val}: must leave some of the {len(train.labels)} "
                "training images for training and some for validation"
            )
        order = torch.randperm(len(train.labels), generator=generator(SPLIT_SEED))
        self.train_set = self._set(train, order[self.num_val :].sort().values)
        self.val_set = self._set(train, order[: self.num_val].sort().values)
        self.test_set = self._set(test, torch.arange(len(test.labels)))
        if len(self.train_set) < self.global_batch_size:
            raise ConfigError(
                f"data.global_batch_size={self.global_batch_size}: must not exceed the "
                f"{len(self.train_set)} training images"
            )

    def state_dict(self) -> dict[str, list[str]]:
        """What a checkpoint keeps: the names of the classes, which the source may have given."""
        return {"class_names": self.class_names}

    def load_state_dict(self, state_dict: dict[str, list[str]]) -> None:
        """Take the names of the classes from a checkpoint, before or after ``setup``."""
        self._name_classes(state_dict["class_names"])

    def train_dataloader(self) -> BatchLoader:
        """Training batches, in a new order each epoch."""
        assert self.train_set is not None, "setup() comes first"
        return self._loader(self.train_set, train=True, may_stop=True)

    def val_dataloader(self) -> BatchLoader:
        """Validation batches, in a fixed order."""
        return self._loader(self.val_set, train=False)

    def test_dataloader(self) -> BatchLoader:
        """Test batches, in a fixed order."""
        return self._loader(self.test_set, train=False, may_stop=True)

    def transfer_batch_to_device(
        self, batch: RawBatch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        """Move one batch to the device; augment it there when training, and normalize it."""
        images = batch.images.to(device, non_blocking=True)
        if self.normalize.scale.device != images.device:
            self.normalize.to(images.device)
        dtype = torch.float32
        if self.trainer:
            dtype = self.trainer.lightning_module.dtype  # type: ignore[assignment]
            if self.trainer.training:
                images = self.augment(images, batch.where)
        return Batch(
            self.normalize(images).to(dtype),
            batch.labels.to(device, non_blocking=True),
            batch.ids.to(device, non_blocking=True),
        )

    def _name_classes(self, names: list[str]) -> None:
        if not self.takes_names_of_source:
            return
        if self.names_are_known and names != self.class_names:
            raise ConfigError(
                f"data.root={self.root}: the model knows the classes {self.class_names}, "
                f"and not {names}"
            )
        self.class_names, self.names_are_known = names, True

    def _load(self, *, train: bool) -> Images | ImageFiles:
        """All official train or test images, checked against the configuration."""
        found = self.source.load(self.root, train=train)
        if isinstance(found, ImageFiles):
            self._name_classes(found.classes)
            num_classes = len(found.classes)
        else:
            shape = (self.num_channels, self.image_size, self.image_size)
            if tuple(found.images.shape[1:]) != shape:
                raise ConfigError(
                    f"data.num_channels={self.num_channels}, data.image_size={self.image_size}: "
                    f"the images found have the shape {list(found.images.shape[1:])}"
                )
            num_classes = int(found.labels.max()) + 1
            device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
            if self._fits_on(device, found.images):
                found = Images(found.images.to(device), found.labels.to(device))
        if num_classes > self.num_classes:
            raise ConfigError(
                f"data.num_classes={self.num_classes}: {num_classes} classes were found in "
                f"{self.root}"
            )
        return found

    def _fits_on(self, device: torch.device, images: Tensor) -> bool:
        if device.type != "cuda":
            return False
        free, _ = torch.cuda.mem_get_info(device)
        return images.nbytes < MEMORY_SHARE * free

    def check_batch_size(self, world_size: int, batches_per_step: int) -> None:
        """Raise a ConfigError if the global batch cannot be shared out equally."""
        shares = world_size * batches_per_step
        if self.global_batch_size % shares == 0:
            return
        below = self.global_batch_size // shares * shares
        nearest = f"{below} or {below + shares}" if below else f"{shares}"
        parts = f"{world_size} ranks"
        if batches_per_step > 1:
            parts += f" x trainer.accumulate_grad_batches={batches_per_step}"
        raise ConfigError(
            f"data.global_batch_size={self.global_batch_size}: does not divide evenly over "
            f"{parts}; the nearest values that do are {nearest}"
        )

    def _set(self, source: Images | ImageFiles, ids: Tensor) -> ImageSet:
        return ImageSet(source, ids, num_channels=self.num_channels, image_size=self.image_size)

    def _loader(self, dataset: ImageSet, *, train: bool, may_stop: bool = False) -> BatchLoader:
        """Batches of a set. Validation runs to its end, so that a checkpoint holds all of it."""
        trainer = self.trainer
        batches_per_step = trainer.accumulate_grad_batches if train and trainer else 1
        sampler = GlobalBatchSampler(
            len(dataset),
            self.global_batch_size // batches_per_step if train else self.eval_batch_size,
            rank=trainer.global_rank if trainer else 0,
            world_size=trainer.world_size if trainer else 1,
            seed=self.seed,
            shuffle=train and self.shuffle,
            drop_last=train,
            batches_per_step=batches_per_step,
        )
        num_workers = self.num_workers if isinstance(dataset.source, ImageFiles) else 0
        loop = trainer.fit_loop if train and trainer else None
        between_steps = None
        for callback in trainer.callbacks if trainer and may_stop else []:  # type: ignore[attr-defined]
            if trainer and isinstance(callback, LastCheckpoint):
                between_steps = partial(callback.between_steps, trainer)
        return BatchLoader(
            dataset, sampler, num_workers=num_workers, loop=loop, between_steps=between_steps
        )
