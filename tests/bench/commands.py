"""What a person waits for: the start, --help, an error, a save, a restart.

python -m tests.bench.commands save FOLDER      # one contender, in this process
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench import recipes
from tests.bench.measure import PYTHON, ROOT, Claim, Row, environment, say

TRAIN = [PYTHON, "train.py"]
RENDER = ["scripts/launch.py", "cluster=k8s", "cluster.image=registry/me:1", "run_id=bench"]
IMPORT = [
    PYTHON, "-c",
    "import time, lightning; from tests.bench.measure import say, started; "
    "say(seconds=time.time() - started())",  # without the end of the process
]  # fmt: skip
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1",
            "--max-restarts=1", "--monitor-interval=0.1"]  # fmt: skip
ANSWERS = {
    "help": [*TRAIN, "--help"], "error": [*TRAIN, "data.num_wrokers=2"],
    "render": [PYTHON, *RENDER],
}  # fmt: skip
WIDTH = 8_000  # hidden units of the net whose checkpoint is saved: 76 MB with Adam


def callback(name: str, **arguments: object) -> list[str]:
    node = "+callbacks.bench"
    words = [f"{node}.{key}={value}" for key, value in arguments.items()]
    return [f"{node}._target_=tests.bench.callbacks.{name}", *words]


def first_step(run_root: Path | str, *words: str) -> list[str]:
    """train.py up to its first optimizer step."""
    own = ["trainer.accelerator=cpu", f"run_root={run_root}"]
    return [*TRAIN, *own, *words, *callback("FirstStep")]


def without_torch() -> None:
    """Raise if help, an error or a render imports torch."""
    for name, (_, *words) in ANSWERS.items():
        done = subprocess.run(
            [PYTHON, "-X", "importtime", *words], cwd=ROOT, env=environment(0),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "hydra" in imported, done.stderr
        assert not {"torch", "lightning"} & imported, f"{name} imports torch"


def many_runs(folder: Path, count: int) -> None:
    """A folder with so many finished runs."""
    if (folder / f"runs-{count}").exists():
        return
    for number in range(count):
        run_dir = folder / f"runs-{count}" / f"digits-cnn-{number:06}"
        run_dir.mkdir(parents=True)
        (run_dir / "metrics.json").write_text("{}")


def train_with_saves(folder: Path, measured: str) -> None:
    """Train a wide net; say how long a save takes, or copying and syncing the same bytes."""
    import torch

    from samestep import build
    from samestep.callbacks.last_checkpoint import LastCheckpoint
    from samestep.config.compose import check
    from samestep.run.history import History

    with tempfile.TemporaryDirectory(dir=folder) as root:
        cfg = check([
            *recipes.overrides("tiny", folder), f"run_root={root}", "run_id=bench",
            f"model.net.hidden_size={WIDTH}", "trainer.max_epochs=4",
        ])  # fmt: skip
        model, data = build.model(cfg), build.datamodule(cfg)
        Path(cfg.run_dir).mkdir()
        trainer = build.trainer(cfg, History(cfg.run_dir))
        seconds = []
        original = trainer.save_checkpoint

        def save(path: Any, *arguments: Any) -> None:
            start = time.perf_counter()
            original(path, *arguments)
            seconds.append(time.perf_counter() - start)

        trainer.save_checkpoint = save
        trainer.fit(model, data)
        if measured == "copy":
            last = next(c for c in trainer.callbacks if isinstance(c, LastCheckpoint)).path
            state = torch.load(last, weights_only=False)
            weights = [*state["state_dict"].values()]
            for entry in state["optimizer_states"][0]["state"].values():
                weights += [value for value in entry.values() if value.ndim]
            seconds = [copy_and_sync(weights, Path(root) / "copy") for _ in range(4)]
    say(seconds=sorted(seconds)[len(seconds) // 2])


def copy_and_sync(tensors: list[Any], path: Path) -> float:
    """Seconds to copy the tensors in memory, and to write the copies to the disk."""
    start = time.perf_counter()
    copies = [tensor.clone() for tensor in tensors]
    with path.open("wb", buffering=0) as file:
        for copy in copies:
            file.write(copy.numpy().data)
        os.fsync(file.fileno())
    return time.perf_counter() - start


def share_of_logging(folder: Path) -> None:
    """The part of an MNIST-format epoch that is spent in the history."""
    from samestep.run.history import History
    from tests.bench import epochs

    spent = [0.0]

    def timed(method: Any) -> Any:
        def run(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                spent[0] += time.perf_counter() - start

        return run

    for name in ("log_metrics", "on_save_checkpoint", "finalize"):
        setattr(History, name, timed(getattr(History, name)))
    result = epochs.ours("mnist", folder)
    say(seconds=spent[0] / sum(result["epochs"]))


def rows(folder: Path) -> Iterator[Row]:
    here = [PYTHON, "-m", "tests.bench.commands"]
    runs = folder / "started"
    yield Row(
        "start", "start: to the first optimizer step",
        {"import": IMPORT, "ours": first_step(runs)},
        [Claim("ours - import lightning <= 0.7 s", "ours", "import", 0.7, subtract=True,
               unit=" s")],
    )  # fmt: skip
    yield Row(
        "answers",
        "help, config error, render: no torch",
        ANSWERS,
        [Claim(f"{name} <= 0.8 s", name, None, 0.8, unit=" s") for name in ANSWERS],
        without_torch,
    )
    yield Row(
        "save",
        "checkpoint of 76 MB",
        {"save": [*here, "save", str(folder)], "copy": [*here, "copy", str(folder)]},
        [Claim("save / memcpy + fsync <= 1.2", "save", "copy", 1.2)],
        lambda: recipes.write_tensors("tiny", folder),
    )
    yield Row(
        "logging",
        "logging in an MNIST-format epoch",
        {"ours": [*here, "logging", str(folder)]},
        [Claim("<= 1 % of the epoch", "ours", None, 1, scale=100, unit=" %")],
        lambda: recipes.write_tensors("mnist", folder),
    )
    words = [*callback("KilledOnce", path=folder / "killed"), f"run_root={folder / 'restarted'}"]
    yield Row(
        "sigkill", "restart after SIGKILL, in place",
        {"import": IMPORT,
         "ours": [PYTHON, *TORCHRUN, "train.py", "trainer.accelerator=cpu", *words]},
        [Claim("kill to the next step - import lightning <= 2 s", "ours", "import", 2,
               subtract=True, unit=" s")],
        lambda: shutil.rmtree(folder / "restarted", ignore_errors=True),
    )  # fmt: skip
    yield Row(
        "runs",
        "start with 10,000 runs in runs/",
        {f"{count}": first_step(folder / f"runs-{count}") for count in (1, 10_000)},
        [Claim("10,000 runs / 1 run", "10000", "1")],
        lambda: [many_runs(folder, count) for count in (1, 10_000)] and None,
    )
    sets = [f"data-{size}" for size in (1, 10, 100)]
    steps = {
        name: [PYTHON, "-m", "tests.bench.commands", "first-step", str(folder), name]
        for name in sets
    }
    yield Row(
        "data", "start: 6 k, 60 k and 600 k images of 28 px", steps,
        [Claim("x 10 - x 1", "data-10", "data-1", subtract=True, unit=" s"),
         Claim("x 100 - x 1", "data-100", "data-1", subtract=True, unit=" s")],
        lambda: [recipes.write_images(name, folder) for name in sets] and None,
    )  # fmt: skip


def main() -> None:
    name, folder, *more = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    if name == "logging":
        share_of_logging(folder)
    elif name == "first-step":
        # The checksums of the files are written by the harness, so the words are known only now.
        command = first_step(folder / "started", *recipes.overrides(more[0], folder))
        os.execv(PYTHON, command)
    else:
        train_with_saves(folder, name)


if __name__ == "__main__":
    main()
