"""Where images come from: each source makes its files present, and reads them."""

import contextlib
import io
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset
from torchvision.datasets.mnist import read_image_file, read_label_file

from project.data.download import DataError, fetch
from samestep import ConfigError

MEMORY_SHARE = 0.25  # of a GPU's free memory that the images may take


class Images(NamedTuple):
    """Labelled images in memory."""

    images: Tensor  # uint8 [N, C, H, W]
    labels: Tensor  # int64 [N], class indices

    def move_to_gpu(self, device: torch.device) -> "Images":
        """The images on a GPU of this rank, if they take little of its memory."""
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if self.images.nbytes < MEMORY_SHARE * free:
                return Images(self.images.to(device), self.labels.to(device))
        return self


class ImageFiles:
    """Labelled images in files, decoded when they are asked for, by any process.

    The paths lie in one block of memory, so that worker processes share it instead of copying it.

    Args:
        classes: their names; the label of an image is a position in this list.
        samples: path and label of each image.
    """

    def __init__(self, classes: list[str], samples: list[tuple[str, int]]) -> None:
        self.classes = classes
        self.labels = torch.tensor([label for _, label in samples])  # int64 [N]
        self._paths = np.array([path for path, _ in samples])

    def read(self, ids: Tensor, num_channels: int, image_size: int) -> Tensor:
        """uint8 ``[B, C, H, W]``: the images ``ids``, made alike by ``read_image``."""
        images = torch.empty(len(ids), num_channels, image_size, image_size, dtype=torch.uint8)
        for image, path in zip(images, self._paths[ids.numpy()], strict=True):
            image.copy_(read_image(Path(path), num_channels, image_size))
        return images


class Source(Protocol):
    """A labelled set of images with an official test set of its own."""

    def prepare(self, root: Path, *, download: bool, mirror: str | None) -> None:
        """Make the files below ``root`` present and intact, or raise a DataError.

        One process of each node calls this first. ``download`` allows to fetch what is missing or
        damaged, and ``mirror`` is an address to use instead of the official one.
        """

    def load(self, root: Path, *, train: bool) -> Images | ImageFiles:
        """All official training or test images, in the order of the files, or a DataError."""


class Digits:
    """The 1,797 handwritten digits that come with scikit-learn, 8 x 8 pixels.

    They have no official test set: 360 images, the same ones in every run, serve as one.
    Source: UCI machine learning repository, Optical Recognition of Handwritten Digits.
    """

    def prepare(self, root: Path, *, download: bool, mirror: str | None) -> None:
        """Nothing to do: the files are part of scikit-learn."""

    def load(self, root: Path, *, train: bool) -> Images:
        """1,437 training or 360 test images, uint8 ``[N, 1, 8, 8]``."""
        # Importing scikit-learn takes almost a second, and reading its file a moment.
        path = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
        table = np.loadtxt(str(path), delimiter=",")  # 64 pixels of 0 to 16, and the label
        order = np.random.RandomState(0).permutation(1797)  # frozen: the same in every numpy
        rows = table[np.sort(order[360:] if train else order[:360])]
        images = (rows[:, :64] * (255 / 16)).round().astype(np.uint8).reshape(-1, 1, 8, 8)
        return Images(torch.from_numpy(images), torch.from_numpy(rows[:, 64].astype(np.int64)))


@dataclass(frozen=True, kw_only=True)
class Archives:
    """A set of images in archives of a server.

    Args:
        url: address below which the archives lie.
        archives: name to md5.
        files: extracted file to md5, verified before the file is read.
        name: directory below ``root``, and the name of the YAML file.
    """

    url: str
    archives: Mapping[str, str]
    files: Mapping[str, str]
    name: str

    def prepare(self, root: Path, *, download: bool, mirror: str | None) -> None:
        """Fetch and verify the files, see ``fetch``."""
        fetch(root / self.name, download=download, mirror=mirror, **vars(self))


@dataclass(frozen=True, kw_only=True)
class MNIST(Archives):
    """Handwritten digits, 28 x 28 pixels, and every other set in the format of MNIST.

    Source: http://yann.lecun.com/exdb/mnist
    """

    name: str = "mnist"

    def load(self, root: Path, *, train: bool) -> Images:
        """Training or test images, uint8 ``[N, 1, 28, 28]``."""
        prefix = root / self.name / ("train" if train else "t10k")
        with reading(Path(f"{prefix}-images-idx3-ubyte")) as path:
            images = read_image_file(path)[:, None]
        with reading(Path(f"{prefix}-labels-idx1-ubyte")) as path:
            return Images(images, read_label_file(path))


@dataclass(frozen=True, kw_only=True)
class CIFAR10(Archives):
    """Photographs of ten kinds of things, 32 x 32 pixels in colour.

    Source: https://www.cs.toronto.edu/~kriz/cifar.html
    """

    name: str = "cifar10"

    def load(self, root: Path, *, train: bool) -> Images:
        """Training or test images, uint8 ``[N, 3, 32, 32]``."""
        prefix = "data_batch_" if train else "test_batch"
        parts = []
        for file in sorted(file for file in self.files if Path(file).name.startswith(prefix)):
            with reading(root / self.name / file) as path, path.open("rb") as stream:
                batch = _ArrayUnpickler(stream, encoding="latin1").load()
                images = torch.from_numpy(batch["data"]).view(-1, 3, 32, 32)
                parts.append(Images(images, torch.tensor(batch["labels"])))
        return Images(*map(torch.cat, zip(*parts, strict=True)))


class ImageFolder:
    """Your own images: ``train/<class>/*.png`` and ``test/<class>/*.png`` below ``root``.

    Or ``<class>/*.png`` alone, of which a fifth is the test set: which ones, their names say, so
    that more images change nothing for the others. Files of the types torchvision knows count, in
    folders of any depth; the others are ignored.
    """

    def prepare(self, root: Path, *, download: bool, mirror: str | None) -> None:
        """Check that both sets have the same classes. Nothing is ever downloaded."""
        classes = []
        for part in parts_of(root):
            with reading(part) as folder:
                classes.append(set(find_classes(folder)[0]))
        if only := sorted(classes[0] ^ classes[-1]):
            raise DataError(f"{root}: train and test have unlike classes; one lacks {only}")

    def load(self, root: Path, *, train: bool) -> ImageFiles:
        """The files of one set, ordered by class and name."""
        parts = parts_of(root)
        folder = parts[0] if train else parts[-1]
        with reading(folder):
            classes, labels = find_classes(folder)
            files = make_dataset(folder, labels, IMG_EXTENSIONS)
            if len(parts) == 1:
                names = [Path(file).relative_to(folder).as_posix() for file, _ in files]
                is_test = [zlib.crc32(name.encode()) % 5 == 0 for name in names]
                files = [file for file, test in zip(files, is_test, strict=True) if test != train]
            return ImageFiles(classes, files)


def parts_of(root: Path) -> list[Path]:
    """The folders of the training and the test set; one if they are not split."""
    parts = [root / "train", root / "test"]
    return parts if any(part.is_dir() for part in parts) else [root]


def find_images(names: Sequence[str]) -> list[Path]:
    """The named files, and all images in and below the named folders.

    Raises:
        ConfigError: if a folder holds no images.
    """
    files: list[Path] = []
    for path in map(Path, names):
        if not path.is_dir():
            files.append(path)
            continue
        found = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMG_EXTENSIONS)
        if not found:
            raise ConfigError(f"{path}: holds no images; they end in {', '.join(IMG_EXTENSIONS)}")
        files += found
    return files


def read_image(path: Path, num_channels: int, image_size: int) -> Tensor:
    """The image in a file, see ``decode_image``; a DataError if it cannot be read."""
    with reading(path):
        return decode_image(path.read_bytes(), num_channels, image_size)


def decode_image(content: bytes, num_channels: int, image_size: int) -> Tensor:
    """uint8 ``[num_channels, image_size, image_size]``; 1 channel is grey, 3 are colours.

    The image is turned upright, scaled to ``image_size`` on its short side, and cropped centrally;
    transparency is dropped. Whatever Pillow raises means that it is damaged; ValueError: it has
    more than 8 bits per channel.
    """
    mode = "L" if num_channels == 1 else "RGB"
    with Image.open(io.BytesIO(content)) as file:
        turned = "exif" in file.info and file.getexif().get(ExifTags.Base.Orientation, 1) != 1
        is_plain = file.mode in ("L", "RGB") and "progressive" not in file.info and not turned
        pixels = None
        if file.format == "JPEG" and is_plain:
            pixels = decode_jpeg(content, image_size, mode)
        if pixels is None:
            pixels = np.array(decode(file, image_size, mode))
    height, width = pixels.shape[:2]
    image = torch.from_numpy(pixels).view(height, width, num_channels).permute(2, 0, 1)
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = image[None, :, top : top + side, left : left + side]
    # A quarter of the time of Pillow's resize, and the same bits on every processor.
    return interpolate(square, (image_size, image_size), mode="bilinear", antialias=True)[0]


def decode_jpeg(content: bytes, image_size: int, mode: str) -> NDArray[np.uint8] | None:
    """uint8 ``[H, W, C]``: a JPEG, no side shorter than ``image_size`` if the file's are not.

    It takes two thirds of the time of ``decode``, because it scales by eighths while it decodes. A
    pixel of the final image differs by a few of the 255 grey values. None if the file is damaged.
    """
    space = "GRAY" if mode == "L" else "RGB"
    pixels: NDArray[np.uint8]
    try:
        pixels = simplejpeg.decode_jpeg(content, space, min_height=image_size, min_width=image_size)
    except ValueError:
        return None  # Pillow says what is wrong with the file
    return pixels


def decode(file: Image.Image, image_size: int, mode: str) -> Image.Image:
    """Any image that Pillow can read."""
    if file.mode.startswith(("I", "F")):
        raise ValueError("more than 8 bits per channel, convert it first")
    file.draft(mode, (image_size, image_size))  # large JPEGs are decoded at a smaller scale
    image: Image.Image = ImageOps.exif_transpose(file)
    if "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert(mode)


class _ArrayUnpickler(pickle.Unpickler):
    """Reads arrays and plain values; a pickle that asks for anything else is refused, not run."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            "_reconstruct": np.zeros(0).__reduce__()[0],
            "ndarray": np.ndarray,
            "dtype": lambda name, align, copy: np.dtype(name, align=bool(align), copy=bool(copy)),
        }
        if module.partition(".")[0] != "numpy" or name not in allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which image data never do")
        return allowed[name]


@contextlib.contextmanager
def reading(path: Any) -> Iterator[Any]:
    """Whatever reading ``path`` raises, raise a DataError that names it."""
    try:
        yield path
    except Exception as error:
        # An error of the system would repeat its number and the path.
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            reason = "it is no image, or of a format that is not known"
        raise DataError(f"{path} cannot be read: {reason}") from error
