"""Image files, named by a real run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from lightning import Trainer
from options import OPTIONS, options
from PIL import Image

from project.data.datamodule import ImageDataModule
from samestep import build
from samestep.config.compose import check
from samestep.errors import ConfigError
from samestep.run.checkpoint import AtomicCheckpointIO
from samestep.run.directory import load_run, resolved
from scripts.predict import BATCH_SIZE, images_in, main
from scripts.predict import predict as predict_files
from tests.conftest import run

Predict = Callable[..., tuple[int, str, str]]


@pytest.fixture
def predict(digits_run: Path, capsys: pytest.CaptureFixture[str]) -> Predict:
    """Runs ``main`` on a command line, and returns its exit code, stdout and stderr."""

    def call(*words: object) -> tuple[int, str, str]:
        values = options([f"run={digits_run}", *map(str, words)], OPTIONS["predict"], files=True)
        code = main(*load_run(values["run"], values["ckpt"]), values)
        return code, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def digits(digits_run: Path) -> ImageDataModule:
    data = load_run(digits_run)[1]
    data.setup("test")
    return data


@pytest.fixture
def files(digits: ImageDataModule, tmp_path: Path) -> list[Path]:
    """The test set as files, ``<class>/<number>.png``."""
    paths = []
    images, labels = digits.test_set.source
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        paths.append(tmp_path / "digits" / str(label.item()) / f"{number:03}.png")
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(paths[-1])
    return sorted(paths)


def test_a_directory_of_the_test_set_gives_the_accuracy_of_the_run(
    digits_run: Path, files: list[Path], tmp_path: Path
) -> None:
    words = [f"run={digits_run}", "format=json", str(tmp_path / "digits")]
    result = run("scripts/predict.py", *words)
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert [item["file"] for item in found] == [str(path) for path in files]
    assert len(files) > 2 * BATCH_SIZE
    right = [item["guesses"][0]["class"] == Path(item["file"]).parent.name for item in found]
    metrics = json.loads((digits_run / "metrics.json").read_text())
    assert sum(right) / len(right) == pytest.approx(metrics["test/accuracy"], abs=1e-6)


def test_the_likeliest_classes_come_first_with_their_probabilities(
    predict: Predict, digits_run: Path, digits: ImageDataModule, files: list[Path]
) -> None:
    code, out, err = predict("top=10", "format=json", "ckpt=last", files[-1])
    assert (code, err) == (0, "")
    (item,) = json.loads(out)
    number = int(files[-1].stem)
    image = digits.test_set.source.images[number][None]
    with torch.inference_mode():
        wanted = load_run(digits_run, "last")[0](digits.normalize(image)).softmax(1)[0].tolist()
    found = {guess["class"]: guess["probability"] for guess in item["guesses"]}
    assert found == pytest.approx(dict(zip(digits.class_names, wanted, strict=True)), abs=1e-5)
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_the_table_has_a_line_for_each_file(predict: Predict, files: list[Path]) -> None:
    code, out, _ = predict("top=2", files[0], files[-1])
    assert code == 0
    header, *lines = (line.split() for line in out.splitlines())
    assert header == ["file", "class", "probability", "class", "probability"]
    assert [line[0] for line in lines] == [str(files[0]), str(files[-1])]
    assert all(float(line[2]) >= float(line[4]) for line in lines)


def test_images_of_any_size_and_mode_are_taken(predict: Predict, tmp_path: Path) -> None:
    Image.new("RGB", (50, 70), "white").save(tmp_path / "photo.JPG")
    Image.new("RGBA", (5, 3)).save(tmp_path / "small.webp")
    Image.new("1", (8, 8)).save(tmp_path / "black.png")
    (tmp_path / "notes.txt").write_text("no image")
    code, out, err = predict("format=json", tmp_path)
    assert (code, err) == (0, "")
    found = {Path(item["file"]).name: item["guesses"] for item in json.loads(out)}
    assert list(found) == ["black.png", "photo.JPG", "small.webp"]
    assert found["black.png"] == found["small.webp"] != found["photo.JPG"]


@pytest.mark.parametrize("form", ["json", "table"])
def test_a_file_that_cannot_be_read_is_named_and_the_others_are_predicted(
    predict: Predict, files: list[Path], tmp_path: Path, form: str
) -> None:
    broken, missing = tmp_path / "broken.png", tmp_path / "missing.png"
    broken.write_bytes(files[0].read_bytes()[:50])
    code, out, err = predict(f"format={form}", broken, files[0], missing)
    assert code == 1
    assert [line.split()[1] for line in err.splitlines()] == [str(broken), str(missing)]
    assert str(files[0]) in out
    assert str(broken) not in out
    code, out, _ = predict(f"format={form}", missing)
    assert (code, out.strip()) == (1, "[]" if form == "json" else "file  class  probability")


def test_more_classes_than_there_are_is_refused(predict: Predict, files: list[Path]) -> None:
    with pytest.raises(ConfigError, match="top=11: must not exceed the 10 classes"):
        predict("top=11", files[0])


def test_a_directory_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no images; they end in \.jpg"):
        images_in([str(tmp_path)])


def test_classes_named_by_folders_are_known_without_the_folders(tmp_path: Path) -> None:
    folders, run_dir = tmp_path / "pets", tmp_path / "runs" / "pets"
    for number, name in enumerate(["cat", "dog", "cat", "dog"]):
        path = folders / ("train", "test")[number // 2] / name / "1.png"
        path.parent.mkdir(parents=True)
        Image.new("L", (8, 8), 200 * (number % 2)).save(path)
        shutil.copy(path, path.with_stem("2"))
    cfg = check(
        [
            *("data=folder", f"data.root={folders}", "data.num_classes=2", "data.num_val=1"),
            *("data.image_size=8", "data.global_batch_size=3", "data.num_workers=0"),
            *("model=mlp", f"run_root={run_dir.parent}", "run_id=pets"),
        ]
    )
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, use_distributed_sampler=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=[AtomicCheckpointIO()],
    )  # fmt: skip
    trainer.fit(build.model(cfg), build.datamodule(cfg))
    trainer.save_checkpoint(run_dir / "checkpoints" / "best.ckpt")
    (run_dir / "config.yaml").write_text(yaml.safe_dump(resolved(cfg)))
    unknown = (folders / "test" / "dog" / "1.png").rename(tmp_path / "unknown.png")
    shutil.rmtree(folders)

    model, data = load_run(run_dir)
    ((_, guesses),) = predict_files(model, data, [unknown])
    assert sorted(name for name, _ in guesses) == ["cat", "dog"]

    (folders / "train" / "ant").mkdir(parents=True)
    shutil.copy(unknown, folders / "train" / "ant")
    with pytest.raises(ConfigError, match="the model knows the classes"):
        data.setup("test")
