"""What a person waits for: the start, --help, an error, a save, a restart."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

IMPORT = """-c "import lightning; from labs.bench.callbacks import FirstStep
FirstStep().on_train_batch_end()" """
ANSWERS = {
    "help": "train.py --help",
    "error": "train.py data.num_wrokers=2",
    "render": "-m samestep launch --render cluster=k8s cluster.image=registry/me:1 run_id=bench",
}
WIDTH = 8_000  # hidden units of the net whose checkpoint is saved: 76 MB with Adam
HALF_MIB = 472  # half of the checkpoint of a net that is 13 times as wide
DATA_SIZES = {"data-1": 6_000, "data-10": 60_000, "data-100": 600_000}  # images


def train(run_root: Path, callback: str = "FirstStep") -> str:
    """train.py with a callback of labs.bench.callbacks: up to its first optimizer step."""
    callback = f"+callbacks.bench._target_=labs.bench.callbacks.{callback}"
    return f"train.py trainer.accelerator=cpu run_root={run_root} {callback}"


def killed_once(folder: Path) -> str:
    """train.py under torchrun, with a rank that kills itself once."""
    torchrun = "-m torch.distributed.run --standalone --max-restarts=1 --monitor-interval=0.1"
    return f"{torchrun} {train(folder, 'KilledOnce')} +callbacks.bench.path={folder / 'killed'}"


def first_step_with(size: str, folder: str) -> None:
    """Become train.py, with so many images in files."""
    place = Path(folder, size)
    write_mnist(place / "MNIST/raw", DATA_SIZES[size])
    words = [
        "data=mnist", "model=mlp", f"data.root={place}", f"data.num_val={DATA_SIZES[size] // 12}",
        "data.global_batch_size=128",
    ]  # fmt: skip
    os.environ["BENCH_STARTED"] = repr(time.time())
    os.execv(sys.executable, [sys.executable, *train(Path(folder, "started")).split(), *words])


def write_mnist(place: Path, num_train: int) -> None:
    """Write black images as the files of MNIST, if they are not there."""
    place.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", num_train), ("t10k", 500)):
        for kind, magic, shape in (("images-idx3", 2051, (28, 28)), ("labels-idx1", 2049, ())):
            path = place / f"{part}-{kind}-ubyte"
            if not path.exists():
                header = b"".join(n.to_bytes(4, "big") for n in (magic, count, *shape))
                path.write_bytes(header + bytes(count * (784 if shape else 1)))


def write_runs(folder: Path, name: str, *counts: int) -> None:
    """Folders with so many finished runs."""
    facts = {"monitor": "val/accuracy", "best": 0.9, "epoch": 20, "time": "2026-01-01T00:00:00Z"}
    for run_dir in (folder / f"{name}-{n}" / f"digits-{i:06}" for n in counts for i in range(n)):
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "run.json").write_text(json.dumps({"state": "finished", **facts}))
        (run_dir / "metrics.json").write_text("{}")


@contextmanager
def timed(owner: type, *names: str) -> Iterator[list[float]]:
    """The seconds of each call of these methods, within this block."""
    seconds: list[float] = []

    def with_clock(method: Any) -> Any:
        def run(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                seconds.append(time.perf_counter() - start)

        return run

    with patch.multiple(owner, **{name: with_clock(getattr(owner, name)) for name in names}):
        yield seconds


def save() -> dict[str, float]:
    """The seconds of a save that training waits for, the median of four epochs."""
    import lightning as L

    from samestep.run.checkpoint import AtomicCheckpointIO

    waits = property(lambda _: False, lambda *_: None)
    with (
        patch.object(AtomicCheckpointIO, "in_background", waits, create=True),
        timed(L.Trainer, "save_checkpoint") as seconds,
    ):
        train_wide_net()
    return {"value": median(seconds)}


def copy() -> dict[str, float]:
    """The seconds to copy the tensors of this checkpoint in memory, to write and to sync them."""
    trainer = train_wide_net()
    tensors = [*trainer.model.state_dict().values()]
    for entry in trainer.optimizers[0].state.values():
        tensors += [value for value in entry.values() if value.ndim]
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(4):
            start = time.perf_counter()
            copies = [tensor.clone() for tensor in tensors]
            with Path(folder, "copy").open("wb", buffering=0) as file:
                for each in copies:
                    file.write(each.numpy().data)
                os.fsync(file.fileno())
            seconds.append(time.perf_counter() - start)
    return {"value": median(seconds)}


def shards(how: str) -> dict[str, float]:
    """The seconds of a save of which each rank writes its part.

    Args:
        how: ``held``: that training waits, where a thread writes in the next steps; ``whole``:
            until all is on the disk, by a save that waits for it.
    """
    import lightning as L

    from samestep.run.checkpoint import AtomicCheckpointIO

    waits = property(lambda _: False, lambda *_: None) if how == "whole" else False
    with (
        patch.object(AtomicCheckpointIO, "in_background", waits, create=True),
        timed(L.Trainer, "save_checkpoint") as saving,
        timed(AtomicCheckpointIO, "commit") as waiting,
    ):
        short = "trainer.limit_train_batches=2", "trainer.limit_val_batches=1"
        slow = "+callbacks.slow={_target_: labs.faults.saboteur.Slow, seconds: 4}"
        train_wide_net("trainer.strategy=fsdp", *short, slow, width=13 * WIDTH)
    # The first one only tries whether what is saved can be read again, and no step comes after the
    # last one, so its wait tells nothing.
    saves = saving[1:-1]
    waited = sum(waiting[:-1]) if how == "held" else 0
    return {"value": (sum(saves) + waited) / len(saves)}


def half() -> dict[str, float]:
    """The seconds to write and to sync half of what all ranks of ``shards`` write.

    Each time the same file, so that its memory is used again: pages that a virtual machine has
    never touched take longer than the disk.
    """
    content, seconds = os.urandom(2**20), []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(4):
            start = time.perf_counter()
            with Path(folder, "half").open("wb", buffering=0) as file:
                for _ in range(HALF_MIB):
                    file.write(content)
                os.fsync(file.fileno())
            seconds.append(time.perf_counter() - start)
    return {"value": median(seconds)}


def train_wide_net(*more: str, width: int = WIDTH) -> Any:
    from labs.bench.epochs import train_ours

    words = f"model.net.hidden_size={width}", "trainer.max_epochs=4"
    return train_ours("tiny", *words, *more).trainer


def logging() -> dict[str, float]:
    """The part of an MNIST-format epoch that is spent in the history, in percent."""
    from labs.bench.epochs import train_ours
    from samestep.run.history import History

    with timed(History, "log_metrics", "on_save_checkpoint", "finalize") as seconds:
        starts = train_ours("mnist").starts
    return {"value": 100 * sum(seconds) / (starts[-1] - starts[0])}


def receipts() -> dict[str, float]:
    """The part of an MNIST-format epoch that is spent in receipts, in percent."""
    from labs.bench.epochs import train_ours
    from samestep.plugins.receipts import Receipts

    hooks = "on_batch_read", "on_save_checkpoint"
    with timed(Receipts, *hooks) as seconds, timed(Receipts, "_begin") as once:
        starts = train_ours("mnist").starts
    return {"value": 100 * (sum(seconds) - sum(once)) / (starts[-1] - starts[0])}
