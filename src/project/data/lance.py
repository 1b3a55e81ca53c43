"""Images of any number, read from Lance tables in a folder or an object store."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import pyarrow as pa
import torch
from torch import Tensor

from project.data.augment import Augment, Normalize
from project.data.images import Batch, RawBatch, make_batch
from project.data.sources import decode_image, reading
from project.rules import check_batch_size
from samestep.data.lance import LanceRows
from samestep.data.loader import BatchLoader
from samestep.data.order import Blocks
from samestep.data.sampler import Slice
from samestep.errors import ConfigError
from samestep.ranks import environment


class LanceImages(LanceRows):
    """The images of one table, decoded and made alike when they are read.

    Args:
        uri: of a table with the columns ``image`` (JPEG, PNG, ...) and ``label``.
        num_channels: 1 is grey, 3 are colours.
        image_size: height and width in pixels.
        options: see ``LanceRows``.
    """

    def __init__(self, uri: str, num_channels: int, image_size: int, **options: Any) -> None:
        super().__init__(uri, ["image", "label"], decode=pa.Table.combine_chunks, **options)
        self.num_channels, self.image_size = num_channels, image_size
        names = (self.table.schema.metadata or {}).get(b"classes")
        self.classes: list[str] | None = json.loads(names) if names else None

    def __getitem__(self, ids: Tensor) -> RawBatch:
        table = super().__getitem__(ids)
        shape = (self.num_channels, self.image_size, self.image_size)
        images = torch.empty(len(ids), *shape, dtype=torch.uint8)
        contents = table["image"].to_pylist()
        for image, id, content in zip(images, ids.tolist(), contents, strict=True):
            with reading(f"{self.uri}: row {id}"):
                image.copy_(decode_image(content, self.num_channels, self.image_size))
        return RawBatch(images, torch.tensor(table["label"].to_pylist(), dtype=torch.int64), ids)


class LanceImageDataModule(L.LightningDataModule):
    """Labelled images in the tables ``train.lance``, ``val.lance`` and ``test.lance``.

    ``scripts/convert.py`` writes them. Only the batches that are read ahead are in memory. A
    checkpoint knows the tables it was trained on, and a run is not continued with others.

    Args:
        root: folder of the tables, such as ``data/photos`` or ``s3://bucket/photos``.
        version: of the table ``train``; None: the newest.
        num_channels, image_size: images are converted to them; size in pixels.
        num_classes: how many the tables have.
        class_names: None takes those of the tables.
        global_batch_size: images per optimizer step, over all ranks.
        eval_batch_size: images per validation or test batch, over all ranks.
        num_threads: threads per rank that read and decode ahead; twice as many batches are held.
        shuffle: a new order of the training images each epoch; ``Blocks`` reads neighbours.
        storage_options: of the store, see ``LanceRows``. Keys come from the environment.
        mean, std: see ``Normalize``.
        crop_padding, flip: see ``Augment``.
        seed: of the order and the augmentation.

    Raises:
        ConfigError: at ``setup``, if the tables are missing, incomplete, or of other classes.
    """

    def __init__(
        self,
        *,
        root: str,
        version: int | None,
        num_channels: int,
        image_size: int,
        num_classes: int,
        class_names: Sequence[str] | None,
        global_batch_size: int,
        eval_batch_size: int,
        num_threads: int,
        shuffle: bool | Blocks,
        storage_options: Mapping[str, str] | None,
        mean: Sequence[float],
        std: Sequence[float],
        crop_padding: int,
        flip: bool,
        seed: int,
    ) -> None:
        super().__init__()
        self.root = root.rstrip("/")
        self.version = version
        self.num_channels, self.image_size = num_channels, image_size
        self.num_classes = num_classes
        self.class_names = [str(name) for name in class_names or []]
        self.global_batch_size, self.eval_batch_size = global_batch_size, eval_batch_size
        self.num_threads = num_threads
        self.shuffle = shuffle
        self.storage_options = storage_options
        self.mean, self.std = list(mean), list(std)
        self.normalize = Normalize(self.mean, self.std)
        self.augment = Augment(crop_padding=crop_padding, flip=flip, seed=seed)
        self.seed = seed
        self.train_set: LanceImages | None = None
        self.learned: dict[str, Any] = {}  # what a checkpoint says of its tables

    def setup(self, stage: str) -> None:
        """Open the tables, once. Lightning calls this on every rank and stage."""
        if self.train_set is not None:
            return
        num_ranks, batches_per_step = environment.world_size(), self._batches_per_step()
        for fault in check_batch_size(self.global_batch_size, num_ranks, batches_per_step):
            raise ConfigError(fault)
        train = self._open("train", self.version)
        self.val_set, self.test_set = self._open("val"), self._open("test")
        if len(train) < self.global_batch_size:
            raise ConfigError(
                f"data.global_batch_size={self.global_batch_size}: must not exceed the "
                f"{len(train)} training images of {train.uri}"
            )
        names = self.class_names or train.classes or [str(n) for n in range(self.num_classes)]
        if len(names) != self.num_classes:
            raise ConfigError(
                f"data.num_classes={self.num_classes}: {train.uri} has {len(names)} classes"
            )
        self.class_names, self.train_set = names, train
        self._compare()

    def train_dataloader(self) -> BatchLoader:
        """Training batches, in a new order each epoch."""
        assert self.train_set is not None, "setup() comes first"
        return BatchLoader(
            self.train_set,
            self.global_batch_size,
            shuffle=self.shuffle,
            drop_last=True,
            seed=self.seed,
            accumulate_grad_batches=self._batches_per_step(),
            num_threads=self.num_threads,
            with_slice=True,
        )

    def val_dataloader(self) -> BatchLoader:
        """Validation batches, in the order of the table."""
        return self._eval_loader(self.val_set)

    def test_dataloader(self) -> BatchLoader:
        """Test batches, in the order of the table."""
        return self._eval_loader(self.test_set)

    def export_inputs(self, num_images: int) -> tuple[torch.nn.Module, Tensor]:
        """For ``project.export``: what comes before the net, and test images as they are stored."""
        self.setup("test")
        return self.normalize, self.test_set[torch.arange(min(num_images, len(self.test_set)))][0]

    def transfer_batch_to_device(
        self, batch: tuple[RawBatch, Slice], device: torch.device, dataloader_idx: int
    ) -> Batch:
        """Move one batch to the device; augment it there when training, and normalize it."""
        return make_batch(*batch, device, self.trainer, self.augment, self.normalize)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the names of the classes, and which table was read."""
        assert self.train_set is not None, "setup() comes first"
        train = self.train_set
        return {"class_names": self.class_names, "digest": train.digest, "version": train.version}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the names from a checkpoint, and compare the tables, before or after ``setup``."""
        self.learned = state_dict
        self.class_names = state_dict["class_names"]
        self._compare()

    def _compare(self) -> None:
        """Raise a ConfigError if a run that continues has begun with other rows."""
        train, learned = self.train_set, self.learned
        if train is None or not learned or train.digest == learned["digest"]:
            return
        raise ConfigError(
            f"data.version={self.version or 'null'}: {train.uri} is at version {train.version}, "
            "with other rows than the run began with; continue with "
            f"data.version={learned['version']}, or start over under another RUN_ID",
            on_all_ranks=True,
        )

    def _open(self, part: str, version: int | None = None) -> LanceImages:
        return LanceImages(
            f"{self.root}/{part}.lance",
            self.num_channels,
            self.image_size,
            version=version,
            storage_options=self.storage_options,
        )

    def _eval_loader(self, images: LanceImages) -> BatchLoader:
        num_threads = self.num_threads
        return BatchLoader(images, self.eval_batch_size, num_threads=num_threads, with_slice=True)

    def _batches_per_step(self) -> int:
        return self.trainer.accumulate_grad_batches if self.trainer else 1
