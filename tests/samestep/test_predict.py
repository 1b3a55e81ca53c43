"""Image files, named by a real run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from PIL import Image
from torch.utils.data import DataLoader

from project.data import Images
from samestep import load_run
from samestep.command_line import call
from samestep.hydra import saved_run
from samestep.predict import columns_of, main
from tests.conftest import run

Predict = Callable[..., tuple[int, str, str]]


@pytest.fixture
def predict(digits_run: Path, capsys: pytest.CaptureFixture[str]) -> Predict:
    """Runs the script on a command line, and returns its exit code, stdout and stderr."""

    def predict(*words: object) -> tuple[int, str, str]:
        code = call(lambda: main([str(digits_run), *map(str, words)]))
        return code, *capsys.readouterr()

    return predict


@pytest.fixture(scope="module")
def digits(digits_run: Path) -> Images:
    data = load_run(digits_run)[1]
    data.setup("test")
    return data


@pytest.fixture
def files(digits: Images, tmp_path: Path) -> list[Path]:
    """The test set as files, ``<class>/<number>.png``."""
    paths = []
    images, labels = digits.test_set.tensors
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        paths.append(tmp_path / "digits" / str(label.item()) / f"{number:03}.png")
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(paths[-1])
    return sorted(paths)


@pytest.mark.program
def test_a_directory_of_the_test_set_gives_the_accuracy_of_the_run(
    digits_run: Path, files: list[Path], tmp_path: Path
) -> None:
    words = [str(digits_run), "--format", "json", str(tmp_path / "digits")]
    result = run("-m", "samestep", "predict", *words)
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert [item["file"] for item in found] == [str(path) for path in files]
    right = [item["class"] == Path(item["file"]).parent.name for item in found]
    metrics = json.loads((digits_run / "metrics.json").read_text())
    assert sum(right) / len(right) == pytest.approx(metrics["test/accuracy"], abs=1e-6)


def test_the_most_likely_classes_come_first_with_their_probabilities(
    predict: Predict, digits_run: Path, digits: Images, files: list[Path]
) -> None:
    code, out, err = predict("--top", 10, "--format", "json", "--ckpt", "last", files[-1])
    assert (code, err) == (0, "")
    (item,) = json.loads(out)
    number = int(files[-1].stem)
    image = digits.test_set.tensors[0][number][None]
    with torch.inference_mode():
        wanted = load_run(digits_run, "last")[0](image).softmax(1)[0].tolist()
    numbers = ["", *(f"_{number}" for number in range(2, 11))]
    found = {item[f"class{number}"]: item[f"probability{number}"] for number in numbers}
    assert found == pytest.approx(dict(zip(digits.class_names, wanted, strict=True)), abs=1e-5)
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_the_table_has_a_line_for_each_file(predict: Predict, files: list[Path]) -> None:
    code, out, _ = predict(files[0], "--top", 2, files[-1])
    assert code == 0
    header, *lines = (line.split(",") for line in out.splitlines())
    assert header == ["file", "class", "probability", "class_2", "probability_2"]
    assert [line[0] for line in lines] == [str(files[0]), str(files[-1])]
    assert all(float(line[2]) >= float(line[4]) for line in lines)


def test_images_of_any_size_and_mode_are_taken(predict: Predict, tmp_path: Path) -> None:
    Image.new("RGB", (50, 70), "white").save(tmp_path / "photo.JPG")
    Image.new("RGBA", (5, 3)).save(tmp_path / "small.webp")
    Image.new("1", (8, 8)).save(tmp_path / "black.png")
    (tmp_path / "notes.txt").write_text("no image")
    code, out, err = predict("--format", "json", tmp_path)
    assert (code, err) == (0, "")
    found = {Path(item.pop("file")).name: item for item in json.loads(out)}
    assert list(found) == ["black.png", "photo.JPG", "small.webp"]
    assert found["black.png"] == found["small.webp"] != found["photo.JPG"]


def test_a_file_that_cannot_be_read_is_named(
    predict: Predict, files: list[Path], tmp_path: Path
) -> None:
    broken, missing = tmp_path / "broken.png", tmp_path / "missing.png"
    broken.write_bytes(files[0].read_bytes()[:50])
    for wrong in (broken, missing, tmp_path / "digits"):
        if wrong.name == "digits":
            for path in files:
                path.unlink()
        code, out, err = predict(wrong)
        assert (code, out) == (1, "")
        assert err.startswith(f"error: {wrong} cannot be read: ")
        assert err.count("\n") == 1


@pytest.mark.filterwarnings("ignore:Total length of `DataLoader`")
def test_wrong_usage_is_one_line(predict: Predict, files: list[Path]) -> None:
    for words, message in [
        (["--top", 11, files[0]], "--top 11: must not exceed the 10 classes of the run"),
        (["--top", -1, files[0]], "--top -1: must be a whole number, at least 0"),
        ([], "there is nothing to predict; name files"),
    ]:
        code, out, err = predict(*words)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {message}")
        assert err.count("\n") == 1


def test_top_0_has_a_column_for_each_class(predict: Predict, files: list[Path]) -> None:
    code, out, _ = predict(files[0], "--top", 0)
    assert code == 0
    header, line = (line.split(",") for line in out.splitlines())
    assert header == ["file", *(f"probability_{number}" for number in range(10))]
    assert sum(map(float, line[1:])) == pytest.approx(1, abs=1e-5)


def test_columns_are_named_and_what_is_no_column_is_rejected() -> None:
    assert columns_of(torch.tensor([0.1, 0.5])) == {"prediction": [0.1, 0.5]}
    assert columns_of(torch.tensor([[1, 2]])) == {"prediction_0": [1], "prediction_1": [2]}
    both = columns_of({"name": ["a"], "score": torch.zeros(1, 1)})
    assert both == {"name": ["a"], "score": [0.0]}
    message = r"prediction as a tensor \[2, 8, 8\]: a table takes tensors"
    with pytest.raises(ValueError, match=message):
        columns_of(torch.zeros(2, 8, 8))


class Lists(BoringModel):
    """Its results are lists, and it has several loaders of two batches each."""

    def __init__(self, num_loaders: int) -> None:
        super().__init__()
        self.num_loaders = num_loaders

    def predict_dataloader(self) -> list[DataLoader]:
        return [DataLoader(torch.ones(2, 32)) for _ in range(self.num_loaders)]

    def predict_step(
        self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0
    ) -> list[int]:
        return [dataloader_idx, batch_idx]


@pytest.mark.parametrize("num_loaders", [1, 2])
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_results_that_are_lists_stay_one_for_each_batch(tmp_path: Path, num_loaders: int) -> None:
    (tmp_path / "config.yaml").write_text("{seed: 0, trainer: {precision: 32-true}}")
    found = saved_run.predict(Lists(num_loaders), None, tmp_path, "cpu")
    assert found == [[0, 0], [0, 1], [1, 0], [1, 1]][: 2 * num_loaders]
