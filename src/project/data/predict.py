"""Image files that somebody names on the command line of ``samestep predict``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from project.data.download import DataError
from project.data.images import FileBatch
from project.data.sources import find_images, read_image
from samestep import ConfigError


def file_loader(
    names: Sequence[str], num_channels: int, image_size: int, errors: list[str]
) -> DataLoader[Any]:
    """Batches of the named files, and of the images in the named folders.

    Args:
        names: files and folders.
        num_channels: 1 is grey, 3 are colours.
        image_size: height and width in pixels.
        errors: gets a line for each file that cannot be read, which is then left out.
    """
    if not names:
        raise ConfigError("there is nothing to predict; name image files, or folders of them")

    def read_files(files: Sequence[Path]) -> FileBatch:
        images, read = [], []
        for file in files:
            try:
                images.append(read_image(file, num_channels, image_size))
            except DataError as error:
                errors.append(str(error))
            else:
                read.append(str(file))
        # torch.stack takes no empty list, and none of these files may be readable.
        none = torch.empty(0, num_channels, image_size, image_size, dtype=torch.uint8)
        return FileBatch(torch.cat([none, *(image[None] for image in images)]), read)

    files: Any = find_images(names)
    return DataLoader(files, batch_size=64, collate_fn=read_files)
