"""The images: where they come from, how they are split, augmented and put into batches."""

import shutil
from itertools import product
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image

from project.data import Images, digits, read_image
from samestep import ConfigError, RunError, Slice
from samestep.hydra import build
from samestep.hydra.compose import check

IMAGES = torch.arange(6 * 3 * 8 * 8, dtype=torch.int16).reshape(6, 3, 8, 8)


def make(*words: str) -> Images:
    """The DataModule of a command line, set up."""
    data = build.build_datamodule(check([*words]))
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Three classes of small photographs, six for training and six for the test."""
    for part, name, number in product(("train", "test"), ("ant", "bee", "cat"), range(6)):
        path = tmp_path / "pets" / part / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (80 * number, 9, 9)).save(path)
    return tmp_path / "pets"


FOLDER = ["data=folder", "data.num_classes=3", "data.image_size=8", "data.global_batch_size=4"]


def test_splits_are_disjoint_complete_and_the_same_for_every_seed():
    data, other = make(), make("seed=7")
    sizes = [len(part) for part in (data.train_set, data.val_set, data.test_set)]
    assert sizes == [1257, 180, 360]
    both = torch.cat([data.train_set.tensors[0], data.val_set.tensors[0]])
    assert both.sum() == torch.as_tensor(digits(None, True, False).data).sum()
    assert torch.equal(data.val_set.tensors[0], other.val_set.tensors[0])


def test_a_batch_is_images_and_labels():
    images, labels = next(iter(make().val_dataloader()))
    assert (images.shape, images.dtype) == ((180, 1, 8, 8), torch.uint8)
    assert (labels.shape, labels.dtype) == ((180,), torch.int64)


def test_only_training_images_are_augmented():
    data = make("data.crop_padding=2", "data.flip=true", "data.shuffle=false")
    data.trainer = L.Trainer(logger=False, accelerator="cpu")
    train = next(iter(data.train_dataloader()))[0]
    assert not torch.equal(train, data.train_set.tensors[0][:32])
    val = next(iter(data.val_dataloader()))[0]
    assert torch.equal(val, data.val_set.tensors[0])


def augment(images: torch.Tensor, start: int = 0, epoch: int = 0, **changed: object) -> object:
    data = build.build_datamodule(check(["data.crop_padding=2", "data.flip=true"]))
    for name, value in changed.items():
        setattr(data, name, value)
    place = Slice(torch.arange(len(images)), epoch, 0, start, 6)
    return data.augment([images, torch.zeros(len(images))], place)[0]


def test_a_slice_is_augmented_as_in_the_whole_batch():
    parts = [augment(IMAGES[start : start + 2], start) for start in (0, 2, 4)]
    assert torch.equal(torch.cat(parts), augment(IMAGES))
    assert augment(IMAGES[:0]).shape == (0, 3, 8, 8)  # a rank may have none


def test_each_epoch_and_seed_draws_anew():
    first = augment(IMAGES)
    assert torch.equal(first, augment(IMAGES))
    assert not torch.equal(first, augment(IMAGES, epoch=1))
    assert not torch.equal(first, augment(IMAGES, seed=1))


def test_augmented_images_are_windows_of_the_padded_image_some_of_them_mirrored():
    padded = torch.nn.functional.pad(IMAGES, (2,) * 4)
    seen = set()
    for image, result in zip(padded, augment(IMAGES), strict=True):
        for row, column, mirrored in product(range(5), range(5), (False, True)):
            window = image[:, row : row + 8, column : column + 8]
            if torch.equal(window.flip(2) if mirrored else window, result):
                seen.add((row, column, mirrored))
    assert len(seen) == len(IMAGES)
    assert {mirrored for *_, mirrored in seen} == {True, False}


def test_folders_are_the_classes_and_workers_read_them(pets: Path):
    data = make(*FOLDER, f"data.root={pets}", "data.num_workers=1", "data.num_val=6")
    assert data.class_names == ["ant", "bee", "cat"]
    (pets / "train/cat").rename(pets / "train/dog")
    data.train_set = None
    with pytest.raises(ConfigError, match=r"'dog'\], not \['ant', .*'cat'\]"):
        data.setup("test")
    (pets / "train/dog").rename(pets / "train/cat")
    data.setup("test")
    assert [len(part) for part in (data.train_set, data.val_set, data.test_set)] == [12, 6, 18]
    batches = list(data.train_dataloader())
    assert [(images.shape, len(labels)) for images, labels in batches] == [((4, 3, 8, 8), 4)] * 3


def test_a_fifth_of_a_folder_is_the_test_set_if_it_is_not_split(pets: Path):
    whole = pets / "train"
    data = make(*FOLDER, f"data.root={whole}", "data.num_val=1", "data.num_workers=0")
    test = {path for path, _ in data.test_set.dataset.samples}
    train = {path for path, _ in data.train_set.dataset.samples}
    assert test
    assert not test & train
    shutil.copy(whole / "ant/0.png", whole / "ant/new.png")
    more = make(*FOLDER, f"data.root={whole}", "data.num_val=1", "data.num_workers=0")
    assert test <= {path for path, _ in more.test_set.dataset.samples}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.num_classes=9"], r"has \['0', '1', .*\], not 9"),
        (["data.num_val=1406"], r"data\.num_val=1406: leaves 31 images, no batch"),
    ],
)
def test_data_that_do_not_fit_the_configuration_are_an_error(words: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        make(*words).train_dataloader()


def test_an_image_is_upright_scaled_and_cropped_at_the_centre(tmp_path: Path):
    pixels = np.zeros((40, 80, 3), np.uint8)
    pixels[:, 18:62] = 200
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[0x0112] = 6  # turned by a quarter
    image.save(tmp_path / "a.png", exif=exif)
    found = read_image(str(tmp_path / "a.png"), 1, 8)
    assert (found.shape, found.dtype) == ((1, 8, 8), torch.uint8)
    assert found.min() >= 198


def test_a_broken_image_is_named(tmp_path: Path):
    (tmp_path / "b.jpg").write_bytes(b"no image")
    with pytest.raises(RunError, match=r"b\.jpg cannot be read: "):
        read_image(str(tmp_path / "b.jpg"), 3, 8)


def test_named_files_and_folders_are_predicted_with_the_names_of_a_checkpoint(pets: Path):
    words = [*FOLDER, f"data.root={pets}", "data.num_workers=0"]
    state = make(*words, "data.num_val=1").state_dict()
    data = build.build_datamodule(check(words))
    data.load_state_dict(state)
    data.predict_files = [str(pets / "test/bee/0.png"), str(pets / "test/cat")]
    ((images, files),) = data.predict_dataloader()
    assert files == [
        f"{pets}/test/{name}.png" for name in ("bee/0", *(f"cat/{i}" for i in range(6)))
    ]
    assert images.shape == (7, 3, 8, 8)
    assert data.class_names == ["ant", "bee", "cat"]
