"""Run directories that nobody has trained, with the files that a report reads."""

import csv
import json
from pathlib import Path
from typing import Any

import yaml

from samestep.run import record

CONFIG = {
    "seed": 0,
    "run_id": "one",
    "choices": {"data": "points"},
    "callbacks": {"best": {"monitor": "val/score", "mode": "max", "dirpath": "x/checkpoints"}},
    "model": {"optimizer": {"lr": 0.25}, "names": ["<script>alert(1)</script>", "b"]},
}


def rows(scale: float = 1.0, epochs: int = 3) -> list[dict[str, float]]:
    """Two metrics per epoch of ten steps, the learning rate, the speed and the seconds."""
    return [
        {
            "epoch": epoch, "step": 10 * epoch + 9, "train/loss": scale / (epoch + 1),
            "val/loss": scale / (epoch + 2), "val/score": 0.5 + epoch / 10, "lr": 0.25,
            "train/points_per_second": 100 * scale, "time/epoch_s": 2.0,
        }
        for epoch in range(epochs)
    ]  # fmt: skip


def make_run(
    run_dir: Path,
    *,
    seed: int = 0,
    lr: float = 0.25,
    score: float = 0.875,
    epoch_s: float = 2.0,
    world_size: int = 1,
    words: tuple[str, ...] = (),
    overridden: dict[str, str] | None = None,
) -> Path:
    """A finished run; it says what ``samestep`` writes, in the same files."""
    run_dir.mkdir(parents=True)
    config: dict[str, Any] = json.loads(json.dumps(CONFIG))
    config |= {"seed": seed, "run_id": run_dir.name}
    config["callbacks"] = {**config.get("callbacks", {}), "artifacts": {"run_dir": str(run_dir)}}
    config["model"]["optimizer"]["lr"] = lr
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    with (run_dir / "metrics.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows()[0]))
        table.writeheader()
        table.writerows(rows())
    metrics = {"test/score": score, "time/epoch_s": epoch_s, "time/total_s": 3 * epoch_s}
    (run_dir / "metrics.json").write_text(json.dumps(metrics))
    start = {
        "command": ["train.py", *words], "started": "2026-11-22T05:00:00+00:00", "hostname": "node",
        "world_size": world_size, "packages": "torch==2.15.0", "git": {"commit": "abc"},
        "overridden": overridden, "cpu": "fast", "cpu_cores": 4, "gpus": [], "load": 0.4,
    }  # fmt: skip
    best = {"monitor": "val/score", "mode": "max", "best": 0.7, "best_epoch": 3}
    record.update(run_dir, record.FINISHED, starts=[start], epoch=3, step=30, **best)
    return run_dir
