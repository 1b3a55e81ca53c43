import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from project.data.download import DataError
from project.data.sources import CIFAR10, MNIST, Digits, ImageFolder, Images, read_image
from tests import mirror

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module", params=["mnist", "cifar10"])
def filled(request, tmp_path_factory):
    """A source whose miniature files were fetched from loopback, where, and what is in them."""
    folder = tmp_path_factory.mktemp(request.param)
    miniature = getattr(mirror, request.param)(folder / "served")
    source = {"mnist": MNIST, "cifar10": CIFAR10}[request.param](
        url="http://127.0.0.1:9", archives=miniature.archives, files=miniature.files
    )
    with mirror.serve(folder / "served") as server:
        source.prepare(folder / "data", download=True, mirror=server.url)
    return source, folder / "data", miniature


@pytest.mark.parametrize("part", ["train", "test"])
def test_official_files_are_read(filled, part):
    source, root, miniature = filled
    source.prepare(root, download=False, mirror=None)
    images, labels = source.load(root, train=part == "train")
    assert images.dtype == torch.uint8
    assert labels.dtype == torch.int64
    assert np.array_equal(images, miniature.images[part])
    assert np.array_equal(labels, miniature.labels[part])


def test_digits_are_split_once_and_for_all(tmp_path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "sklearn", None)  # its import takes a second of each start
        train, test = (Digits().load(tmp_path, train=train) for train in (True, False))
    from sklearn.datasets import load_digits

    assert train.images.shape == (1437, 1, 8, 8)
    assert test.images.shape == (360, 1, 8, 8)
    assert train.images.dtype == torch.uint8
    assert train.labels.dtype == torch.int64
    assert train.images.max() == 255
    everything = sorted(image.numpy().tobytes() for image in torch.cat([train.images, test.images]))
    pixels = (load_digits().images * (255 / 16)).round().astype(np.uint8)
    assert everything == sorted(image.tobytes() for image in pixels)
    assert test.labels[:8].tolist() == [4, 5, 6, 9, 4, 7, 8, 9]
    assert test.labels.bincount().min() >= 25


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classes of images, in every mode an image may have."""
    root = tmp_path_factory.mktemp("folder")
    red = np.zeros((20, 40, 3), np.uint8)
    red[:, 8:32, 0] = 200  # the middle, which a central crop keeps
    image = Image.fromarray(red)
    for part in ("train", "test"):
        for name in ("ant", "bee/deep"):
            (root / part / name).mkdir(parents=True)
        image.save(root / part / "ant" / "rgb.png")
        image.convert("L").save(root / part / "ant" / "grey.png")
        image.convert("RGBA").save(root / part / "bee" / "alpha.png")
        palette = image.convert("P")
        palette.save(root / part / "bee" / "deep" / "palette.png", transparency=bytes([255, 0, 7]))
        image.save(root / part / "bee" / "photo.jpg", quality=95)
        (root / part / "bee" / "notes.txt").write_text("not an image")
    return root


def test_folder_is_read(folder):
    source = ImageFolder()
    source.prepare(folder, download=True, mirror=None)
    train = source.load(folder, train=True)
    assert train.classes == ["ant", "bee"]
    assert train.labels.tolist() == [0, 0, 1, 1, 1]  # grey, rgb, alpha, photo, palette
    images = train.read(torch.arange(5), 3, 10)
    assert images.shape == (5, 3, 10, 10)
    assert images.dtype == torch.uint8
    for image in images[1:]:
        assert (image[0].int() - 200).abs().max() < 8
        assert image[1:].max() < 8
    grey = train.read(torch.tensor([1, 0]), 1, 10)
    assert grey.shape == (2, 1, 10, 10)
    assert (grey.int() - 60).abs().max() < 3  # 0.299 of 200
    assert train.read(torch.tensor([], dtype=torch.int64), 3, 10).shape == (0, 3, 10, 10)


@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "deep"])
def test_unreadable_image_is_named(folder, tmp_path, damage):
    path = tmp_path / "broken.png"
    content = (folder / "train/ant/rgb.png").read_bytes()
    if damage == "deep":
        Image.fromarray(np.full((8, 8), 60_000, np.uint16)).save(path)
    else:
        path.write_bytes({"truncated": content[:60], "text": b"hello", "empty": b""}[damage])
    with pytest.raises(DataError, match=r"broken.png cannot be read: .+"):
        read_image(path, 3, 8)


def test_folder_without_images_says_so(folder, tmp_path):
    source = ImageFolder()
    with pytest.raises(DataError, match=r"train cannot be read: .*No such file"):
        source.prepare(tmp_path, download=True, mirror=None)
    for part, name in (("train", "ant"), ("train", "bee"), ("test", "ant"), ("test", "cow")):
        (tmp_path / part / name).mkdir(parents=True)
    with pytest.raises(DataError, match=r"unlike classes.*'bee', 'cow'"):
        source.prepare(tmp_path, download=True, mirror=None)
    with pytest.raises(DataError, match=r"train cannot be read: Found no valid file.*ant, bee"):
        source.load(tmp_path, train=True)


def test_the_class_in_the_documentation_works(tmp_path):
    code = (REPOSITORY / "docs" / "data.md").read_text().split("```python\n")[1].split("```")[0]
    names = {"Path": Path, "torch": torch, "Images": Images}
    exec(code, names)
    train, test = (names["Squares"]().load(tmp_path, train=train) for train in (True, False))
    assert train.images.shape == (1000, 1, 8, 8)
    assert train.images.dtype == torch.uint8
    assert len(test.labels) == 200
