"""Which predictions of two runs differ."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from project import load_run
from project.predicted import draw, find_changes, galleries
from samestep.errors import RunError


def write(run_dir: Path, *guesses: str) -> Path:
    """A run that has guessed these classes; the truth is always ``a``."""
    lines = [f"{number},a,{guess},0.5" for number, guess in enumerate(guesses)]
    (run_dir / "predictions").mkdir(parents=True)
    (run_dir / "predictions/guesses.csv").write_text(
        "\n".join(["id,truth,guess,probability", *lines, ""])
    )
    return run_dir


def test_changed_guesses_are_found_and_counted(tmp_path: Path):
    one = write(tmp_path / "one", "a", "b", "b", "a", "c")
    other = write(tmp_path / "other", "a", "a", "c", "b", "a")
    changes, num = find_changes(one, other)
    assert [change.id for change in changes] == [1, 2, 3, 4]
    assert num == 5
    assert str(changes[0]) == "1: a, guessed b (50.0%), then a (50.0%)"
    (gallery,) = galleries([one, other])
    assert "4 of 5 test images: 2 are right only in other, 1 only in one." in gallery.text
    assert "Without pictures" in gallery.text  # these runs have no configuration
    assert len(gallery.pictures) == 4


def test_runs_that_cannot_be_compared_say_why(tmp_path: Path):
    one, other = write(tmp_path / "one", "a"), write(tmp_path / "other", "a")
    path = other / "predictions/guesses.csv"
    path.write_text(path.read_text().replace(",a,a,", ",b,a,"))
    with pytest.raises(RunError, match="not tested on the same images"):
        find_changes(one, other)
    path.write_text("id,truth\n1,a\n")
    assert "it is damaged" in galleries([one, other])[0].text
    path.unlink()
    assert "No such file" in galleries([one, other])[0].text


def test_the_pictures_are_those_of_the_test_set(digits_run: Path):
    addresses = draw(digits_run, [7, 3])
    _, data = load_run(digits_run)
    data.setup("test")
    for id_, address in zip((7, 3), addresses, strict=True):
        content = base64.b64decode(address.partition(",")[2])
        with Image.open(io.BytesIO(content)) as image:
            pixels = np.asarray(image)
        assert pixels.shape == (96, 96)  # 8 x 8 pixels, enlarged twelve times
        wanted = data.test_set[torch.tensor([id_])].images[0, 0].numpy()
        assert (pixels[::12, ::12] == wanted).all()
