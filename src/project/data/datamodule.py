"""Images and labels, from disk to batches on the device."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

from project.data.augment import Augment, Normalize
from project.data.images import Batch, ImageSet, RawBatch
from project.data.sources import ImageFiles, Images, Source
from project.rules import check_batch_size
from samestep.data.loader import BatchLoader
from samestep.data.order import Blocks
from samestep.data.sampler import Slice
from samestep.data.seeds import generator
from samestep.errors import ConfigError
from samestep.ranks import environment

SPLIT_SEED = 0  # the same images are held out in every run, whatever its seed
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
        mean, std: see ``Normalize``.
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
        self.normalize = Normalize(self.mean, self.std, image_size)
        self.seed = seed
        self.augment = Augment(crop_padding=crop_padding, flip=flip, seed=seed)

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
        )

    def val_dataloader(self) -> BatchLoader:
        """Validation batches, in a fixed order."""
        return self.loader(self.val_set, self.eval_batch_size)

    def test_dataloader(self) -> BatchLoader:
        """Test batches, in a fixed order."""
        return self.loader(self.test_set, self.eval_batch_size)

    def loader(self, images: Any, batch_size: int, **options: Any) -> BatchLoader:
        """Batches with their slices, on which the augmentation depends."""
        return BatchLoader(images, batch_size, with_slice=True, **options)

    def transfer_batch_to_device(
        self, batch: tuple[RawBatch, Slice], device: torch.device, dataloader_idx: int
    ) -> Batch:
        """Move one batch to the device; augment it there when training, and normalize it.

        The images get the dtype of the trainer's model; without a trainer they are float32.
        """
        (images, labels, ids), place = batch
        images = images.to(device, non_blocking=True)
        if self.normalize.scale.device != images.device:
            self.normalize.to(images.device)
        dtype = torch.float32
        if self.trainer:
            dtype = self.trainer.lightning_module.dtype  # type: ignore[assignment]
            if self.trainer.training:
                images = self.augment(images, place)
        return Batch(
            self.normalize(images).to(dtype),
            labels.to(device, non_blocking=True),
            ids.to(device, non_blocking=True),
        )

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


class ImageDataModule(ImageBatches):
    """A labelled image data set, split into train, val and test.

    ``val`` is ``num_val`` images drawn from the training set, the same ones in every run and on
    every rank; it is never augmented. ``test`` is the data set's own test set, untouched.

    Images that fit in memory are kept there as bytes, on the accelerator if they take less than a
    quarter of its free memory. Whole batches are gathered, augmented and normalized at once.

    Args:
        source: where the images come from.
        root: directory of all data sets.
        download: fetch missing files. False: missing files are an error.
        mirror: address to fetch from instead of the official one.
        num_val: training images held out for validation; None: a tenth of them.
        num_workers: loader processes per rank, for images that are read from files.
        images: the arguments of ``ImageBatches``.

    Raises:
        ConfigError: at ``setup``, if ``global_batch_size`` is less than an image for each rank, or
            the configuration does not describe the images that were found.
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
        if self.train_set is not None:
            return
        num_ranks = environment.world_size()
        check_batch_size(self.global_batch_size, num_ranks, self.batches_per_step())
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
        order = torch.randperm(num_images, generator=generator(SPLIT_SEED))
        kinds = {"num_channels": self.num_channels, "image_size": self.image_size}
        self.train_set = ImageSet(train, order[num_val:].sort().values, **kinds)
        self.val_set = ImageSet(train, order[:num_val].sort().values, **kinds)
        self.test_set = ImageSet(test, torch.arange(len(test.labels)), **kinds)

    def export_inputs(self, num_images: int) -> tuple[torch.nn.Module, torch.Tensor]:
        """For ``project.export``: what comes before the net, and test images as they are stored."""
        self.num_workers, self.eval_batch_size = 0, num_images
        self.prepare_data()
        self.setup("test")
        raw, _ = next(iter(self.test_dataloader()))
        return self.normalize, raw.images

    def loader(self, images: ImageSet, batch_size: int, **options: Any) -> BatchLoader:
        """Images in files are read by other processes."""
        num_workers = self.num_workers if isinstance(images.source, ImageFiles) else 0
        return super().loader(images, batch_size, num_workers=num_workers, **options)

    def shared_memory_bytes(self) -> int:
        """Bytes that the loader processes of one rank hold in /dev/shm: two batches each."""
        images = max(self.global_batch_size, self.eval_batch_size) / environment.world_size()
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
