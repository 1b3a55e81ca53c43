"""The last thing a run says."""

import json
import shlex
import statistics
from datetime import timedelta
from pathlib import Path

from project.records import read_history

SPEED = "train/images_per_second"


def summary(run_dir: Path, seconds: float | None = None) -> str:
    """What a person wants to know of a finished run: figures, files, and what to type next.

    Args:
        run_dir: directory of the run.
        seconds: how long this process trained; None if it did not.
    """
    metrics = json.loads((run_dir / "metrics.json").read_text())
    attempts = json.loads((run_dir / "logs" / "environment.json").read_text())
    rows = read_history(run_dir)
    epochs = int(max((row["epoch"] for row in rows if "train/loss" in row), default=-1)) + 1
    facts = [("epochs", str(epochs))]
    for name in ("test/accuracy", "test/loss"):
        if metrics.get(name) is not None:
            facts.append((name, f"{metrics[name]:.4f}"))
    if validated := [row for row in rows if "val/accuracy" in row]:
        best = max(validated, key=lambda row: row["val/accuracy"])
        facts.append(
            ("val/accuracy", f"{best['val/accuracy']:.4f} in epoch {best['epoch'] + 1:.0f}")
        )
    if seconds is not None:
        facts.append(("time", f"{timedelta(seconds=round(seconds))} h:m:s"))
    if speeds := [row[SPEED] for row in rows if SPEED in row]:
        facts.append(("images/s", f"{statistics.median(speeds):,.0f}"))
    overrides = [
        word for word in attempts[-1]["command"][1:] if not word.startswith("trainer.max_")
    ]
    again = shlex.join(["python", "train.py", *overrides, f"trainer.max_epochs={2 * epochs}"])
    return "\n".join(
        [
            f"Finished: {run_dir}",
            *(f"  {name:<14} {fact}" for name, fact in facts),
            "Look at",
            f"  {run_dir}/predictions     test images with guesses, and the confusion matrix",
            f"  {run_dir}/metrics.csv     every epoch",
            "Next",
            f"  python scripts/evaluate.py run={run_dir}",
            f"  python scripts/predict.py run={run_dir} image.png",
            f"  RUN_ID={run_dir.name} {again}",
        ]
    )
