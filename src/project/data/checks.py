"""What a configuration of images cannot be, and what the images that were found must be like.

A wrong argument is a ValueError. Images that are not what the configuration says are a ConfigError,
which names the key.
"""

from collections.abc import Sequence

import torch

from project.data.sources import ImageFiles, Images
from samestep import ConfigError


def check_length(name: str, values: Sequence[object], count: int) -> None:
    """Raise a ValueError if there is not one value for each channel or class."""
    if len(values) != count:
        raise ValueError(f"{name}={list(values)}: must have {count} values")


def check_sizes(num_channels: int, image_size: int, num_classes: int) -> None:
    """Images have a channel and a pixel, and there are two classes to tell apart."""
    if num_channels < 1 or image_size < 1 or num_classes < 2:
        raise ValueError("num_channels, image_size and num_classes must be at least 1, 1 and 2")


def check_pixel_statistics(mean: Sequence[float], std: Sequence[float], num_channels: int) -> None:
    """One mean and one standard deviation above 0 for each channel."""
    check_length("mean", mean, num_channels)
    check_length("std", std, num_channels)
    if min(std) <= 0:
        raise ValueError(f"std={list(std)}: must be numbers above 0")


def check_class_names(names: Sequence[str], num_classes: int) -> None:
    """Raise a ValueError if the configured names are not one for each class."""
    check_length("class_names", names, num_classes)
    if len(set(names)) < num_classes:
        raise ValueError(f"class_names={list(names)}: each must be another name")


def check_split(num_images: int, num_val: int | None, global_batch_size: int) -> int:
    """How many training images are held out: ``num_val``, or a tenth if it is None."""
    tenth = max(1, num_images // 10)
    held_out = tenth if num_val is None else num_val
    if held_out > 0 and global_batch_size <= num_images - held_out:
        return held_out
    keys = {"num_val": num_val, "global_batch_size": global_batch_size}
    now = ", ".join(f"data.{key}={value}" for key, value in keys.items() if value)
    fits = max(1, min(global_batch_size, (num_images - tenth) // 4))
    raise ConfigError(
        f"{now}: is too much for {num_images} training images; add data.num_val={tenth} "
        f"data.global_batch_size={fits}"
    )


def check_classes(found: Images | ImageFiles, num_classes: int, root: str) -> list[str]:
    """The names of the classes: those of the folders, otherwise their numbers."""
    if isinstance(found, ImageFiles):
        names, num_found = found.classes, len(found.classes)
        fits = num_found == num_classes
    else:
        names, num_found = (
            [str(number) for number in range(num_classes)],
            int(found.labels.max()) + 1,
        )
        fits = num_found <= num_classes
    if not fits:
        raise ConfigError(
            f"data.num_classes={num_classes}: {num_found} classes were found in {root}"
        )
    return names


def check_order(given: list[str], names: list[str]) -> None:
    """Configured names may be other words, but not the folders' names in another order."""
    if given != names == sorted(given):
        raise ConfigError(f"data.class_names={given}: must be in the order of the labels, {names}")


def check_images(found: Images, source: object, num_channels: int, image_size: int) -> None:
    """Check types and shapes of images in memory, which a source of yours may have returned."""
    images, labels = found
    if images.dtype != torch.uint8 or labels.dtype != torch.int64 or len(images) != len(labels):
        raise ConfigError(
            f"data.source: {type(source).__name__}.load must return images uint8 "
            "[N, C, H, W], from 0 to 255, and as many labels int64 [N]; it returned images "
            f"{images.dtype} {[*images.shape]} and labels {labels.dtype} {[*labels.shape]}"
        )
    if list(images.shape[1:]) != [num_channels, image_size, image_size]:
        raise ConfigError(
            f"data.num_channels={num_channels}, data.image_size={image_size}: "
            f"the images found have the shape {list(images.shape[1:])}"
        )
