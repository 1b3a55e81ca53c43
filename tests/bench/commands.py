"""What a person waits for: the start, --help, an error, a save, a restart."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from tests.bench import sets
from tests.bench.measure import ROOT, environment

IMPORT = [
    "-c",
    "import time, lightning; from tests.bench.measure import say, started; "
    "say(value=time.time() - started())",  # without the end of the process
]
ANSWERS = {
    "help": ["train.py", "--help"], "error": ["train.py", "data.num_wrokers=2"],
    "render": ["scripts/launch.py", "cluster=k8s", "cluster.image=registry/me:1", "run_id=bench"],
}  # fmt: skip
WIDTH = 8_000  # hidden units of the net whose checkpoint is saved: 76 MB with Adam


def train(run_root: Path | str, *words: str, callback: str = "FirstStep") -> list[str]:
    """train.py with a callback of tests.bench.callbacks: up to its first optimizer step."""
    own = ["trainer.accelerator=cpu", f"run_root={run_root}"]
    return ["train.py", *own, *words, f"+callbacks.bench._target_=tests.bench.callbacks.{callback}"]


def killed_once(folder: Path) -> list[str]:
    """train.py under torchrun, with a rank that kills itself once."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1",
                "--max-restarts=1", "--monitor-interval=0.1"]  # fmt: skip
    place = f"+callbacks.bench.path={folder / 'killed'}"
    return [*torchrun, *train(folder / "restarted", place, callback="KilledOnce")]


def first_step(folder: str, task: str) -> None:
    """Become train.py. The checksums of its files are known only now."""
    words = train(Path(folder, "started"), *sets.overrides(task, Path(folder)))
    os.execv(sys.executable, [sys.executable, *words])


def without_torch() -> None:
    """Raise if help, an error or a render imports torch."""
    for name, words in ANSWERS.items():
        done = subprocess.run(
            [sys.executable, "-X", "importtime", *words], cwd=ROOT, env=environment(0),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "hydra" in imported, done.stderr
        assert not {"torch", "lightning"} & imported, f"{name} imports torch"


class Stopwatch:
    """Puts a clock around methods."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def timed(self, owner: type, name: str) -> Any:
        original = getattr(owner, name)

        def run(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*arguments, **named)
            finally:
                self.seconds.append(time.perf_counter() - start)

        return patch.object(owner, name, run)


def save(folder: str) -> dict[str, float]:
    """Train a wide net; the seconds of a save."""
    import lightning as L

    with tempfile.TemporaryDirectory(dir=folder) as root:
        stopwatch = Stopwatch()
        with stopwatch.timed(L.Trainer, "save_checkpoint"):
            train_wide_net(root, folder)
    return {"value": median(stopwatch.seconds)}


def copy(folder: str) -> dict[str, float]:
    """The seconds to copy the tensors of this checkpoint in memory, to write and to sync them."""
    import torch

    with tempfile.TemporaryDirectory(dir=folder) as root:
        last = train_wide_net(root, folder) / "checkpoints" / "last.ckpt"
        state = torch.load(last, weights_only=False)
        tensors = [*state["state_dict"].values()]
        for entry in state["optimizer_states"][0]["state"].values():
            tensors += [value for value in entry.values() if value.ndim]
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            copies = [tensor.clone() for tensor in tensors]
            with Path(root, "copy").open("wb", buffering=0) as file:
                for each in copies:
                    file.write(each.numpy().data)
                os.fsync(file.fileno())
            seconds.append(time.perf_counter() - start)
    return {"value": median(seconds)}


def train_wide_net(root: str, folder: str) -> Path:
    """Four epochs, each with a save; returns the run directory."""
    from samestep import build
    from samestep.config.compose import check
    from samestep.run.history import History

    cfg = check([
        *sets.overrides("tiny", Path(folder)), f"run_root={root}", "run_id=bench",
        f"model.net.hidden_size={WIDTH}", "trainer.max_epochs=4",
    ])  # fmt: skip
    Path(cfg.run_dir).mkdir()
    trainer = build.trainer(cfg, History(cfg.run_dir))
    trainer.fit(build.model(cfg), build.datamodule(cfg))
    return Path(cfg.run_dir)


def logging(folder: str) -> dict[str, float]:
    """The part of an MNIST-format epoch that is spent in the history, in percent."""
    from samestep.run.history import History
    from tests.bench import epochs

    stopwatch = Stopwatch()
    with (
        stopwatch.timed(History, "log_metrics"),
        stopwatch.timed(History, "on_save_checkpoint"),
        stopwatch.timed(History, "finalize"),
    ):
        timer = epochs.train_ours("mnist", folder)
    return {"value": 100 * sum(stopwatch.seconds) / (timer.starts[-1] - timer.starts[0])}
