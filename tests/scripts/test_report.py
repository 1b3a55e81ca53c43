"""The page that a real run leaves, in a real browser."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from samestep.report import page
from tests.conftest import QUICK, final_figures, run

CHROMIUM = shutil.which("chromium")
THEMES = {"dark": 0, "light": 1}  # as Blink numbers them


def test_the_script_writes_the_page_anew(digits_run: Path, tmp_path: Path):
    target = tmp_path / "page.html"
    result = run("scripts/report.py", str(digits_run), "--output", str(target))
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{target}\n", "")
    assert target.read_text() == (digits_run / page.NAME).read_text()
    result = run("scripts/report.py", str(tmp_path))
    assert result.returncode == 2
    assert "must be the directory of a run" in result.stderr


def test_the_page_of_a_run_is_small_and_has_all_its_parts(digits_run: Path):
    path = digits_run / page.NAME
    text = path.read_text()
    assert path.stat().st_size < 1_000_000
    for title in ("Most confident mistakes", "Random sample", "Confusion matrix", "Per class"):
        assert f"<h3>{title}</h3>" in text
    for chart in ("loss", "accuracy", "lr", "images_per_second", "time/epoch_s"):
        assert f"<h3>{chart}</h3>" in text
    assert "What is missing" not in text
    assert text.count("<mark>") == len(QUICK)  # run_root, and no report=false


def chromium(*words: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    # Without a GPU and a sandbox, which a container has not.
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    return subprocess.run(
        [CHROMIUM, *flags, *words], capture_output=True, text=True, timeout=120, check=True
    )


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_shows_the_page_in_both_themes(digits_run: Path, tmp_path: Path):
    address = (digits_run / page.NAME).as_uri()
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    shown = chromium(profile, "--dump-dom", address)
    assert "CONSOLE" not in shown.stderr
    text = re.sub("<[^>]+>", " ", shown.stdout)
    assert f"{final_figures(digits_run)['test/accuracy']:.4f}" in text
    brightness = {}
    for theme, number in THEMES.items():
        picture = tmp_path / f"{theme}.png"
        chromium(
            profile, f"--blink-settings=preferredColorScheme={number}", "--window-size=1200,900",
            f"--screenshot={picture}", address,
        )  # fmt: skip
        brightness[theme] = mean_of(picture)
    assert brightness["dark"] < 70 < 200 < brightness["light"]


def mean_of(picture: Path) -> float:
    """The mean brightness, from 0 to 255."""
    import numpy as np
    from PIL import Image

    with Image.open(picture) as image:
        return float(np.asarray(image.convert("L")).mean())
