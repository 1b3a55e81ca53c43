import pickle
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import ExifTags, Image
from torch.utils.data import DataLoader

from project.data import sources
from project.data.download import DataError
from project.data.sources import CIFAR10, MNIST, Digits, ImageFolder, Images, read_image
from tests import mirror
from tests.conftest import environment

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


def test_of_a_folder_without_parts_a_fifth_is_the_test_set(tmp_path):
    source = ImageFolder()

    def names(train: bool) -> set[str]:
        return {Path(path).name for path in source.load(tmp_path, train=train)._paths}

    for name in ("ant", "bee"):
        (tmp_path / name).mkdir()
        for number in range(100):
            (tmp_path / name / f"{name}{number}.png").touch()
    source.prepare(tmp_path, download=True, mirror=None)
    train, test = names(True), names(False)
    assert not train & test
    assert len(train | test) == 200
    assert 25 < len(test) < 55
    for number in range(40):
        (tmp_path / "ant" / f"ant{number}.png").unlink()
    assert names(True) < train
    assert names(False) < test


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
    with pytest.raises(DataError, match=r"cannot be read: Couldn't find any class folder"):
        source.prepare(tmp_path, download=True, mirror=None)
    (tmp_path / "test").mkdir()
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


@pytest.mark.filterwarnings("ignore:dtype.*align")  # of their reader, in numpy 2.4.0 to 2.4.4
@pytest.mark.parametrize("train", [True, False])
def test_same_as_torchvision(filled, train, tmp_path, monkeypatch):
    source, root, miniature = filled
    ours = source.load(root, train=train)
    if miniature.name == "mnist":
        (tmp_path / "MNIST").mkdir()
        (tmp_path / "MNIST" / "raw").symlink_to(root / "mnist")
        theirs = torchvision.datasets.MNIST(tmp_path, train=train)
        images, labels = theirs.data[:, None], theirs.targets
    else:
        checksums = [(Path(file).name, md5) for file, md5 in miniature.files.items()]
        monkeypatch.setattr(torchvision.datasets.CIFAR10, "train_list", checksums[:5])
        monkeypatch.setattr(torchvision.datasets.CIFAR10, "test_list", checksums[5:])
        monkeypatch.setattr(torchvision.datasets.CIFAR10, "_load_meta", lambda self: None)
        theirs = torchvision.datasets.CIFAR10(root / "cifar10", train=train)
        images = torch.from_numpy(theirs.data).permute(0, 3, 1, 2)
        labels = torch.tensor(theirs.targets)
    assert torch.equal(ours.images, images)
    assert torch.equal(ours.labels, labels)


@pytest.mark.parametrize(
    "content", [b"", b"\0\0\x08\x03" + b"\0\0\0\x09" * 3 + b"short", b"GIF89a.."]
)
def test_bad_idx_file_is_named(tmp_path, content):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "t10k-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(DataError, match=r"mnist/t10k-images-idx3-ubyte cannot be read: ."):
        MNIST(url="", archives={}, files={}).load(tmp_path, train=False)


class Malicious:
    def __reduce__(self):
        return eval, ("open('harmed', 'w')",)


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
def test_malicious_pickle_is_refused(tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    content = pickle.dumps({"data": Malicious(), "labels": [1]}, protocol)
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "test_batch").write_bytes(content)
    files = {"test_batch": mirror.md5(content)}
    source = CIFAR10(url="", archives={}, files=files)
    source.prepare(tmp_path, download=False, mirror=None)  # the checksum is right
    with pytest.raises(DataError, match=r"test_batch cannot be read: it asks for .*eval"):
        source.load(tmp_path, train=False)
    assert not Path("harmed").exists()


def test_two_sets_of_one_format_have_their_own_directories(tmp_path):
    fashion = MNIST(url="", archives={}, files={"x": "0" * 32}, name="fashion_mnist")
    with pytest.raises(DataError, match=r"fashion_mnist/x is missing.*data=fashion_mnist"):
        fashion.prepare(tmp_path, download=False, mirror=None)


def test_folder_is_read_by_worker_processes(folder):
    files = ImageFolder().load(folder, train=False)

    def read(ids):
        return files.read(torch.tensor(ids), 3, 10)

    loader = DataLoader(range(5), batch_size=5, collate_fn=read, num_workers=1)
    assert torch.equal(next(iter(loader)), files.read(torch.arange(5), 3, 10))
    copy = pickle.loads(pickle.dumps(files))
    assert torch.equal(copy.read(torch.arange(5), 3, 10), files.read(torch.arange(5), 3, 10))


def test_worker_process_hands_the_error_on_without_its_traceback(folder, tmp_path):
    path = tmp_path / "train" / "ant" / "broken.png"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    files = ImageFolder().load(tmp_path, train=True)
    loader = DataLoader(
        range(1), collate_fn=lambda ids: files.read(torch.tensor(ids), 3, 8), num_workers=1
    )
    with pytest.raises(DataError) as error:
        next(iter(loader))
    assert str(error.value).startswith(f"{path} cannot be read: it is no image")
    assert "\n" not in str(error.value)


def test_photos_are_turned_upright(tmp_path):
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:8] = 255  # bright on top
    exif = Image.Exif()
    exif[0x0112] = 3  # the camera was upside down
    Image.fromarray(pixels).save(tmp_path / "photo.jpg", exif=exif)
    image = read_image(tmp_path / "photo.jpg", 1, 16)
    assert image[0, 15].min() > 250
    assert image[0, 0].max() < 5


@pytest.mark.parametrize("name", ["photo.png", "photo.jpg"])
def test_large_photo_is_scaled_and_cropped(tmp_path, name):
    pixels = np.tile(np.linspace(100, 150, 800), (400, 1))
    pixels[::2] -= 90  # fine stripes, which must be averaged away
    pixels[1::2] += 90
    Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / name, quality=95)
    image = read_image(tmp_path / name, 1, 40).float()
    expected = torch.from_numpy(pixels[:, 200:600].reshape(40, 10, 40, 10).mean((1, 3)))
    assert (image[0] - expected).abs().max() < 5


def prepare_data(*overrides, cwd):
    return subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / "prepare_data.py", *overrides],
        cwd=cwd, env=environment(), capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.program
def test_script_says_what_is_wrong(tmp_path, monkeypatch, capsys):
    done = prepare_data("data=cifar11", cwd=tmp_path)
    assert done.returncode == 2
    assert "cifar10" in done.stderr
    assert "Traceback" not in done.stderr
    overrides = ["data=mnist", "data.mirror=http://127.0.0.1:9", f"data.root={tmp_path}/file/data"]
    (tmp_path / "file").write_text("not a directory")
    script = REPOSITORY / "scripts" / "prepare_data.py"
    monkeypatch.setattr(sys, "argv", [str(script), *overrides])
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(SystemExit) as end:  # in this process, which has imported torch
        runpy.run_path(str(script), run_name="__main__")
    error = capsys.readouterr().err
    assert end.value.code == 1
    assert error.count("\n") == 1
    assert f"cannot use {tmp_path}/file/data/mnist for data set mnist" in error


def smooth_photo() -> Image.Image:
    """A photograph of 500 x 375 pixels that every decoder must show alike."""
    values = np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((500, 375), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("num_channels", [1, 3])
@pytest.mark.parametrize("image_size", [32, 400])
def test_both_decoders_show_the_same_picture(
    tmp_path: Path, image_size: int, num_channels: int, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "photo.jpg"
    smooth_photo().save(path, quality=90)
    decoded = []
    for used in (sources.decode_jpeg, lambda *_: None):
        calls: list[object] = []
        monkeypatch.setattr(
            sources, "decode_jpeg", lambda *a, used=used, calls=calls: calls.append(a) or used(*a)
        )
        decoded.append(read_image(path, num_channels, image_size).float())
        assert calls
    difference = (decoded[0] - decoded[1]).abs()
    assert difference.mean() < 1.5  # of 255
    assert difference.max() < 16


ODD = {
    "CMYK": lambda image, path: image.convert("CMYK").save(path),
    "progressive": lambda image, path: image.save(path, progressive=True),
    "turned": lambda image, path: image.save(path, exif=turned()),
    "PNG": lambda image, path: image.save(path, "PNG"),
    "GIF": lambda image, path: image.save(path, "GIF"),
}


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    return exif


@pytest.mark.parametrize("kind", ODD)
def test_odd_files_are_left_to_pillow(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "decode_jpeg", lambda *_: pytest.fail("not a plain JPEG"))
    ODD[kind](smooth_photo(), tmp_path / "photo.jpg")
    assert read_image(tmp_path / "photo.jpg", 3, 64).shape == (3, 64, 64)


def test_a_jpeg_that_is_cut_in_its_middle_is_refused(tmp_path: Path):
    path = tmp_path / "photo.jpg"
    smooth_photo().save(path)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(DataError, match="cannot be read: image file is truncated"):
        read_image(path, 3, 64)


@pytest.mark.program
def test_pictures_have_the_same_bits_on_every_processor(tmp_path: Path):
    noise = np.random.default_rng(0).integers(0, 256, (301, 400, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "photo.jpg", quality=90)
    Image.fromarray(noise).save(tmp_path / "photo.png")
    # No vector instructions; torch takes those of this processor otherwise.
    plain = environment() | {"ATEN_CPU_CAPABILITY": "default"}
    code = (
        "import torch; from pathlib import Path; from project.data.sources import read_image\n"
        # The second name is that of older versions.
        "assert torch.backends.cpu.get_cpu_capability() in ('DEFAULT', 'NO AVX')\n"
        "for name in ('photo.jpg', 'photo.png'):\n"
        "    images = [read_image(Path(name), 3, size) for size in (32, 224, 400)]\n"
        "    torch.save(images, name + '.pt')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=plain, check=True)
    for name in ("photo.jpg", "photo.png"):
        there = torch.load(tmp_path / f"{name}.pt")
        here = [read_image(tmp_path / name, 3, size) for size in (32, 224, 400)]
        assert all(map(torch.equal, here, there))
