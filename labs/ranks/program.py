"""Trains rows on some ranks: ``python labs/ranks/program.py``, with the variables of torchrun.

Each job runs in a process that is forked here: a signal ends it, and the next job follows.

``ORDER=wrong`` plants a fault: a rank adds up its slices one after the other, not in the tree.
"""

import csv
import json
import os
import signal
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch

from labs.ranks.rows import CONTROL, ROWS, VIRTUAL_RANKS, Row
from samestep import Trainer
from samestep.ranks import environment, virtual

STEP = 6
"""The one after which a signal comes, within the second epoch of four steps."""
RESULT = "digests.json"
MEASURED = "time/", "system/"
"""Prefixes of columns that differ from run to run."""


class Job(NamedTuple):
    """A run, or its next part.

    row: the index of the row; -1: the control.
    folder: of the run.
    signal: the name of the one that ends it; empty: it runs to its end.
    port: at which the ranks meet.
    """

    row: int
    folder: str
    signal: str
    port: int

    def find_row(self) -> Row:
        return ROWS[self.row] if self.row >= 0 else CONTROL


class Signaller(L.Callback):
    """Sends a signal: SIGTERM to the last rank, SIGKILL to all."""

    def __init__(self, name: str) -> None:
        self.signum = signal.Signals[name]

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        is_last = environment.rank() == environment.world_size() - 1
        if trainer.global_step == STEP and (is_last or self.signum == signal.SIGKILL):
            os.kill(os.getpid(), self.signum)
            # A handler runs between two instructions of Python.
            time.sleep(0.01)


def train(job: Job) -> None:
    """Train and test, or continue."""
    row = job.find_row()
    options = {"virtual_ranks": VIRTUAL_RANKS, "gradient_clip_val": 1.0, **row.options}
    callbacks = options.pop("callbacks", list)()
    if job.signal:
        callbacks.append(Signaller(job.signal))
    trainer = Trainer(
        run_dir=job.folder, accelerator="cpu", devices=environment.world_size(), max_epochs=2,
        log_every_n_steps=1, save_every_s=0 if job.signal == "SIGKILL" else "auto",
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks, **options,
    )  # fmt: skip
    model = row.model()
    training, validation, test = row.loaders()
    trainer.fit(model, training, validation)
    measured = describe(trainer.callback_metrics)
    trainer.test(model, test)
    if trainer.is_global_zero:
        parts = {
            "weights": [model.state_dict(), dict(model.named_buffers())],
            "optimizer": [each.state_dict() for each in trainer.optimizers],
            "metrics": [measured, describe(trainer.callback_metrics)],
            "metrics.csv": read_metrics(Path(job.folder)),
        }
        digests = {name: sha256(repr(describe(part)).encode()) for name, part in parts.items()}
        texts = {name: digest.hexdigest() for name, digest in digests.items()}
        Path(job.folder, RESULT).write_text(json.dumps(texts))


def describe(value: Any) -> Any:
    """The bits of all tensors and numbers in a value."""
    if isinstance(value, torch.Tensor):
        bits = value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), bits
    if isinstance(value, dict):
        return [(str(key), describe(value[key])) for key in sorted(value, key=str)]
    if isinstance(value, list | tuple):
        return [*map(describe, value)]
    return value


def read_metrics(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv, without what is measured."""
    rows = []
    with (folder / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            kept = {name: text for name, text in row.items() if not name.startswith(MEASURED)}
            rows.append(kept)
    return rows


def add_in_sequence(tree: Any, number: int, gradients: Any) -> None:
    """The planted fault, for ranks that have a whole subtree each."""
    node = number, number + 1
    if tree._stack:
        (start, _), before = tree._stack.pop()
        gradients, node = virtual.add(before, gradients), (start, number + 1)
    tree._stack.append((node, gradients))


def main() -> None:
    if os.environ.get("ORDER") == "wrong":
        virtual.GradientTree.add = add_in_sequence  # type: ignore[method-assign]
    for fields in json.loads(Path(sys.argv[1]).read_text()):
        job = Job(*fields)
        child = os.fork()
        if child == 0:
            os.environ["MASTER_PORT"] = str(job.port)
            code = 1
            try:
                train(job)
                code = 0
            except SystemExit as stopped:
                code = int(stopped.code or 0)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.waitpid(child, 0)
        assert not (job.signal and Path(job.folder, RESULT).exists()), f"{job} was not interrupted"


if __name__ == "__main__":
    main()
