"""The page that a real run leaves, in a real browser."""

import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from samestep.report import page
from tests.conftest import NO_PICTURES, QUICK, final_figures, run

CHROMIUM = shutil.which("chromium")
THEMES = {"dark": 0, "light": 1}  # as Blink numbers them


def test_the_script_writes_the_page_anew(digits_run: Path, tmp_path: Path):
    target = tmp_path / "page.html"
    result = run("-m", "samestep", "report", str(digits_run), "--output", str(target))
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{target}\n", "")
    assert target.read_text() == (digits_run / page.NAME).read_text()
    result = run("-m", "samestep", "report", str(tmp_path))
    assert result.returncode == 2
    assert "must be the directory of a run" in result.stderr


def test_no_home_directory_is_needed(digits_run: Path, tmp_path: Path):
    """The option keeps the fork server of the tests away, which has imported matplotlib."""
    words = [
        "-Wignore",
        "-m",
        "samestep",
        "report",
        str(digits_run),
        "--output",
        str(tmp_path / "page"),
    ]
    result = run(*words, HOME="/proc", TMPDIR=str(tmp_path))
    assert (result.returncode, result.stderr) == (0, "")


def test_the_page_of_a_run_is_small_and_has_all_its_parts(digits_run: Path):
    path = digits_run / page.NAME
    text = path.read_text()
    assert path.stat().st_size < 1_000_000
    for title in ("Most confident mistakes", "Confusion matrix"):
        assert f"<h3>{title}</h3>" in text
    for chart in ("loss", "accuracy", "lr", "samples_per_second", "time/epoch_s"):
        assert f"<h3>{chart}</h3>" in text
    assert "What is missing" not in text
    assert text.count("<mark>") == len(QUICK)  # run_root, and no report=false


def test_a_run_that_is_stopped_or_fails_leaves_a_page_too(tmp_path: Path):
    words = [
        *QUICK, NO_PICTURES, "report=true", "model=mlp", f"run_root={tmp_path}",
        "+callbacks.signaller._target_=tests.signaller.Quiet",
        f"+callbacks.signaller.dirpath={tmp_path / 'seen'}",
        "+callbacks.loser._target_=tests.signaller.Loser",
    ]  # fmt: skip
    stopped = run("train.py", *words, RUN_ID="one", SIGNAL_AT=f"25 {signal.SIGTERM:d} 0 rank")
    assert stopped.returncode == 143, stopped.stderr
    text = (tmp_path / "one" / page.NAME).read_text()
    assert '"state stopped">stopped</span> SIGTERM' in text
    assert "<td>after step 26, SIGTERM</td>" in text

    # Between training and test no callback of Lightning learns of an error.
    failed = run("train.py", *words, RUN_ID="one", LOSE_BEST="1")
    assert failed.returncode == 1
    assert failed.stderr.count("error: ") == 1
    text = (tmp_path / "one" / page.NAME).read_text()
    assert '"state failed">failed</span>' in text
    assert "best.ckpt is refused: it is missing, or damaged" in text
    listed = run("-m", "samestep", "runs", str(tmp_path))
    assert "failed: checkpoints/best.ckpt is refused: it is missing" in listed.stdout


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
