"""A fast and a slow rank: seconds per epoch with equal, given and measured shares.

python -m tests.slow_rank       # about two minutes; prints the figures of docs/distributed.md

Each rank sleeps for every image that its net sees, so the ranks are as fast as this says, also on a
machine with two processors. Rank 1 sleeps as many times as long as the first column says. The
losses of all steps are compared with those of one rank.
"""

import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from library.tests.kit import Clock
from project.nets.mlp import MLP
from samestep.callbacks import clock
from samestep.ranks import environment
from tests.conftest import ROOT
from tests.conftest import environment as variables

SECONDS_PER_IMAGE = 1e-3
IMAGES_PER_EPOCH = 19 * 64
BASE = [
    "trainer.accelerator=cpu", "trainer.max_epochs=2", "data.global_batch_size=64", "model=mlp",
    "report=false", "data.crop_padding=1",
    "model.net._target_=tests.slow_rank.SlowNet",
    "+callbacks.recorder._target_=tests.recorder.Recorder",
]  # fmt: skip


class SlowNet(MLP):
    """An MLP that sleeps for each image.

    Args:
        seconds: sleep per image, for each rank.
        options: see ``MLP``.
    """

    def __init__(self, *, seconds: list[float], **options: Any) -> None:
        super().__init__(**options)
        self.seconds = seconds[environment.rank()]

    def forward(self, images: Tensor) -> Tensor:
        self.spend(self.seconds * len(images))
        return super().forward(images)

    def spend(self, seconds: float) -> None:
        """Take so long."""
        time.sleep(seconds)


CLOCK = Clock()


class TickingNet(SlowNet):
    """Takes as long by the clock that times forward passes, and in truth no time."""

    def spend(self, seconds: float) -> None:
        clock.time = CLOCK
        CLOCK.sleep(seconds)


def slow_net(*factors: float) -> str:
    """The override that says how long each rank sleeps, in units of ``SECONDS_PER_IMAGE``."""
    return f"+model.net.seconds={[factor * SECONDS_PER_IMAGE for factor in factors]}"


def train(directory: Path, name: str, *overrides: str) -> list[float]:
    """Train a run; returns the loss of each step, over all ranks."""
    records = directory / f"records-{name}"
    command = [
        sys.executable, "train.py", *BASE, *overrides, f"run_root={directory}",
        f"+callbacks.recorder.dirpath={records}",
    ]  # fmt: skip
    subprocess.run(
        command, cwd=ROOT, env=variables(RUN_ID=name), stdout=subprocess.DEVNULL, check=True
    )
    return losses(records)


def losses(records: Path) -> list[float]:
    """Loss of each global batch: the mean over its images, on all ranks."""
    ranks = [json.loads(path.read_text()) for path in sorted(records.glob("rank-*.json"))]
    steps = zip(
        *([line for line in rank if line["stage"] == "train"] for rank in ranks), strict=True
    )
    return [
        sum(part["loss"] * len(part["ids"]) for part in parts)
        / sum(len(part["ids"]) for part in parts)
        for parts in steps
    ]


def seconds_per_epoch(run_dir: Path) -> float:
    """Seconds of training in the last epoch, without validation."""
    with (run_dir / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("train/samples_per_second")]
    return IMAGES_PER_EPOCH / float(rows[-1]["train/samples_per_second"])


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        curve = train(directory, "one", slow_net(0))
        train(directory, "alike", "trainer.devices=2", slow_net(1, 1))
        fastest = seconds_per_epoch(directory / "alike")
        print("| rank 1 is slower | `cluster.shares` | shares | time per epoch | loss differs by |")
        print("|---|---|---|---|---|")
        print("| not | `equal` | 1, 1 | 1 | |")
        for factor in (2, 4):
            for shares in ("equal", f"[{factor},1]", "auto"):
                name = f"slow-{factor}-{shares.strip('[]').replace(',', '-')}"
                words = ["trainer.devices=2", slow_net(1, factor), f"cluster.shares={shares}"]
                ours = train(directory, name, *words)
                used = {"equal": [1, 1]}.get(shares, [factor, 1])
                if shares == "auto":
                    path = directory / name / "checkpoints/last.ckpt"
                    used = torch.load(path, weights_only=True)["callbacks"]["SliceWeighting"][
                        "shares"
                    ]
                ratio = seconds_per_epoch(directory / name) / fastest
                worst = max(abs(a - b) for a, b in zip(ours, curve, strict=True))
                shown = ", ".join(f"{share:g}" for share in used)
                cells = [f"{factor} x", f"`{shares}`", shown, f"{ratio:.2f}", f"{worst:.0e}"]
                print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
