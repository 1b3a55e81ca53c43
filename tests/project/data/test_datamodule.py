"""Every data set feeds every model; splits, batches and sizes are what the docs say."""

from itertools import product
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image

from project.data.sources import ImageFiles, Images
from samestep.errors import ConfigError
from samestep.hydra import build
from samestep.hydra.compose import check
from tests import mirror

QUIET = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False,
    "num_sanity_val_steps": 0,
}  # fmt: skip


def write_folder(root: Path, classes: int = 3, num: int = 6) -> None:
    """Colour photographs in miniature: ``train/<class>/<n>.png`` and ``test/<class>/<n>.png``."""
    rng = np.random.default_rng(0)
    for part, label, number in product(("train", "test"), range(classes), range(num)):
        path = root / part / f"class{label}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 80, (40, 50, 3)) + 60 * label
        Image.fromarray(pixels.astype(np.uint8)).save(path)


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory):
    """Overrides that choose each data set, in miniature, with files that are really there."""
    root = tmp_path_factory.mktemp("data")
    sets = {"digits": ["data.global_batch_size=32"]}
    for name, make in (("mnist", mirror.mnist), ("cifar10", mirror.cifar10)):
        (root / f"{name}-archives").mkdir()
        miniature = make(root / f"{name}-archives")
        with mirror.serve(root / f"{name}-archives") as server:
            sets[name] = [
                *miniature.overrides(root / name, server.url),
                "data.num_val=20", "data.global_batch_size=16",
            ]  # fmt: skip
            data = build.build_datamodule(check(sets[name]))
            data.prepare_data()
    write_folder(root / "folder")
    sets["folder"] = [
        "data=folder", f"data.root={root / 'folder'}", "data.num_classes=3", "data.num_val=6",
        "data.global_batch_size=4", "data.image_size=32", "data.num_workers=1",
    ]  # fmt: skip
    return sets


@pytest.mark.parametrize(
    ("data", "model"),
    [("digits", "mlp"), ("mnist", "cnn"), ("cifar10", "resnet18"), ("folder", "cnn"),
     ("digits", "resnet18"), ("folder", "mlp")],
)  # fmt: skip
def test_data_sets_of_all_shapes_train_all_models(overrides, data: str, model: str):
    small = ["model.net.width=4"] if model == "resnet18" else []
    cfg = check([*overrides[data], f"model={model}", *small, "data.download=false"])
    classifier, datamodule = build.build_model(cfg), build.build_datamodule(cfg)
    before = {name: value.clone() for name, value in classifier.net.named_parameters()}
    trainer = L.Trainer(max_epochs=1, limit_train_batches=1, **QUIET)
    trainer.fit(classifier, datamodule)
    assert trainer.global_step == 1
    assert any(not torch.equal(v, before[k]) for k, v in classifier.net.named_parameters())
    trainer.test(classifier, datamodule, verbose=False)
    assert 0 <= trainer.callback_metrics["test/accuracy"] <= 1


@pytest.fixture
def digits(compose):
    data = build.build_datamodule(compose())
    data.setup("fit")
    return data


def test_splits_are_disjoint_and_complete(digits):
    train, val = set(digits.train_set.ids.tolist()), set(digits.val_set.ids.tolist())
    assert (len(train), len(val), len(digits.test_set)) == (1257, 180, 360)
    assert not train & val


def test_batches_are_images_labels_and_ids(digits):
    batch = next(iter(digits.val_dataloader()))
    assert (batch.images.shape, batch.images.dtype) == ((180, 1, 8, 8), torch.uint8)
    assert (batch.labels.shape, batch.labels.dtype) == ((180,), torch.int64)
    assert torch.equal(digits.val_set.source.images[batch.ids], batch.images)


def test_normalized_images_have_zero_mean_and_unit_variance(digits, compose):
    everything = build.build_model(compose()).normalize(digits.train_set.source.images)
    assert everything.mean().abs() < 0.05
    assert abs(everything.std() - 1) < 0.05


def test_only_training_images_are_augmented(compose):
    cfg = compose("data.crop_padding=2", "data.flip=true", "trainer.max_epochs=1")
    classifier, data = build.build_model(cfg), build.build_datamodule(cfg)
    changed = {}

    class Look(L.Callback):
        def look(self, stage, batch):
            plain = data.train_set.source.images[batch.ids]
            changed[stage] = not torch.equal(plain, batch.images)

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.look("train", batch)

        def on_validation_batch_start(self, trainer, pl_module, batch, *_):
            self.look("val", batch)

    L.Trainer(max_epochs=1, limit_train_batches=1, callbacks=[Look()], **QUIET).fit(
        classifier, data
    )
    assert changed == {"train": True, "val": False}


PIXELS, LABELS = torch.zeros(40, 1, 8, 8, dtype=torch.uint8), torch.arange(40) % 10


def test_folders_name_the_classes(overrides):
    data = build.build_datamodule(check(overrides["folder"]))
    data.prepare_data()
    data.setup("fit")
    assert data.class_names == ["class0", "class1", "class2"]


def test_the_defaults_fit_a_small_folder_or_the_error_says_what_does(tmp_path: Path):
    words = ["data=folder", "data.num_classes=2", "data.num_workers=0", "data.image_size=8"]

    def split(root: Path, *more: str) -> tuple[int, int]:
        data = build.build_datamodule(check([*words, f"data.root={root}", *more]))
        data.setup("fit")
        assert len(data.train_dataloader()) > 0
        return len(data.train_set), len(data.val_set)

    write_folder(tmp_path / "hundred", classes=2, num=50)
    assert split(tmp_path / "hundred") == (90, 10)
    write_folder(tmp_path / "few", classes=2, num=6)
    for wrong in ([], ["data.num_val=12"], ["data.num_val=500", "data.global_batch_size=512"]):
        with pytest.raises(ConfigError, match=": is too much for 12 training images; add") as error:
            split(tmp_path / "few", *wrong)
        remedy = str(error.value).partition("; add ")[2].split()
        assert split(tmp_path / "few", *remedy) == (11, 1)


def test_the_split_does_not_depend_on_the_seed(digits, compose):
    other = build.build_datamodule(compose("seed=7"))
    other.setup("fit")
    assert torch.equal(digits.val_set.ids, other.val_set.ids)


@pytest.mark.parametrize(("steps", "expected"), [(1, 20), (3, 60)])
def test_accumulated_batches_count_as_one_optimizer_step(compose, steps: int, expected: int):
    cfg = compose(f"trainer.accumulate_grad_batches={steps}")
    classifier, data = build.build_model(cfg), build.build_datamodule(cfg)
    trainer = L.Trainer(max_epochs=1, accumulate_grad_batches=steps, limit_val_batches=0, **QUIET)
    trainer.fit(classifier, data)
    assert len(data.train_dataloader()) == expected
    assert trainer.global_step == 20


def test_too_few_classes_are_refused(compose):
    cfg = compose("data.num_classes=9", "data.class_names=null")
    with pytest.raises(ConfigError, match=r"data\.num_classes=9: 10 classes were found"):
        build.build_datamodule(cfg).setup("fit")


class Returns:
    """A source that returns what it is given."""

    def __init__(self, found: Images | ImageFiles) -> None:
        self.found = found

    def prepare(self, root, *, download, mirror):
        """Nothing to do."""

    def load(self, root, *, train):
        return self.found


@pytest.mark.parametrize(
    ("classes", "overrides", "message"),
    [
        (4, [], r"data.num_classes=3: 4 classes were found"),
        (3, ["data.class_names=[c0,c2,c1]"], r"must be in the order of the labels, \['c0', 'c1'"),
    ],
)
def test_folders_must_be_the_classes(compose, classes: int, overrides, message: str):
    names = [f"c{number}" for number in range(classes)]
    cfg = compose("data.num_classes=3", "data.class_names=null", *overrides)
    data = build.build_datamodule(cfg)
    data.source = Returns(ImageFiles(names, [("0.png", 0), ("1.png", 1)]))
    with pytest.raises(ConfigError, match=message):
        data.setup("fit")


def test_workers_read_what_the_sampler_says(overrides):
    data = build.build_datamodule(check(overrides["folder"]))
    data.setup("fit")
    data.augment.crop_padding, data.augment.flip = 0, False
    loader = data.train_dataloader()
    (first, *_), place = list(loader), next(iter(loader.order))
    assert torch.equal(first.ids, data.train_set.ids[place.ids])
    assert torch.equal(first.images, data.train_set[place.ids].images)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.global_batch_size=2000", "data.global_batch_size=2000"),
        ("data.image_size=9", r"data.image_size=9: the images found have the shape \[1, 8, 8\]"),
    ],
)
def test_a_configuration_that_does_not_fit_the_images_is_refused(compose, override, message):
    with pytest.raises(ConfigError, match=message):
        build.build_datamodule(compose(override)).setup("fit")


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (
            PIXELS.float(),
            LABELS,
            r"Returns.load must return .* images torch.float32 \[40, 1",
        ),
        (PIXELS, LABELS[:30], r"and labels torch.int64 \[30\]"),
        (PIXELS, LABELS + 1, r"data.num_classes=10: 11 classes were found"),
        (PIXELS[:, :, 1:], LABELS, r"have the shape \[1, 7, 8\]"),
    ],
)
def test_what_a_source_returns_is_checked(compose, images, labels, message: str):
    data = build.build_datamodule(compose())
    data.source = Returns(Images(images, labels))
    with pytest.raises(ConfigError, match=message):
        data.setup("fit")
