"""The pictures of the test, in each tracker."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import run


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all trackers, each of which writes its own files."""
    root = tmp_path_factory.mktemp("tracked")
    words = [
        "model=mlp", "trainer.max_epochs=1", "logger=[tensorboard,wandb,mlflow]", "report=false",
        f"run_root={root}", "trainer.accelerator=cpu",
    ]  # fmt: skip
    result = run("train.py", *words, RUN_ID="mine", WANDB_MODE="offline", timeout=240)
    assert result.returncode == 0, result.stderr
    return root / "mine"


def test_wandb_gets_the_pictures(tracked: Path):
    names = {path.name for path in tracked.glob("wandb/offline-run-*/files/media/*/test/*")}
    shown = {name.rpartition("_")[0].rstrip("_0123456789") for name in names}
    assert shown == {"confusion_matrix", "grid"}


def test_tensorboard_shows_the_pictures(tracked: Path):
    events = EventAccumulator(str(tracked / "tensorboard")).Reload()
    assert set(events.Tags()["images"]) == {"test/confusion_matrix", "test/grid"}
    (image,) = events.Images("test/grid")
    assert image.encoded_image_string.startswith(b"\x89PNG")


def test_mlflow_keeps_the_pictures(tracked: Path):
    paths = {path.name for path in tracked.glob("mlflow/*/*/artifacts/test/*")}
    assert paths == {"confusion_matrix.png", "grid.png"}
