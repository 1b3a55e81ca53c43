"""Trains shapes one after the other on some ranks: ``python labs/losses/program.py``.

Each is trained for one epoch in 64 bits, and clipped. What it ends with is in a file of its own,
and a line is printed, as soon as it is done.
"""

import argparse
import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from labs.losses.shapes import SHAPES
from labs.losses.shapes.base import Shape
from samestep import BatchLoader, Trainer
from samestep.ranks import environment

BATCH_SIZE = 25
WHOLE, ACCUMULATED, CUT = "whole", "accumulated", "cut"
MODES = {1: (WHOLE, ACCUMULATED, CUT), 2: (WHOLE, ACCUMULATED), 3: (WHOLE, CUT)}
"""How the batches of a step are made, on so many ranks.

whole        A step has a batch of a DataLoader, which ``split_batches`` splits.
accumulated  A step has two of them.
cut          A step has one batch of a BatchLoader, which is cut into two.
"""


class Job(NamedTuple):
    """A shape, in one of its forms."""

    shape: Shape
    is_mended: bool

    @property
    def name(self) -> str:
        return f"{self.shape.name}: {self.shape.remedy}" if self.is_mended else self.shape.name

    @property
    def draws(self) -> bool:
        """Whether its steps draw random numbers."""
        return self.shape.draws and not self.is_mended

    def make_model(self) -> L.LightningModule:
        model = self.shape.mended if self.is_mended else self.shape.model
        assert model is not None
        return model()

    def make_data(self) -> Any:
        shape = self.shape
        if self.is_mended and shape.mended_data is not None:
            return shape.mended_data()
        return shape.data()


class Result(NamedTuple):
    """What a run ends with on rank zero."""

    weights: dict[str, Tensor]
    metrics: dict[str, Tensor]
    said: str
    """Before its first step."""


def jobs_of(shapes: Sequence[Shape]) -> list[Job]:
    """Each form of these shapes."""
    jobs = []
    for shape in shapes:
        jobs.append(Job(shape, False))
        if shape.mended is not None:
            jobs.append(Job(shape, True))
    return jobs


def modes_of(shape: Shape, num_ranks: int) -> tuple[str, ...]:
    # Lightning does not accumulate for modules that call their optimizers.
    return (WHOLE,) if shape.is_manual else MODES[num_ranks]


class Listener(L.Callback):
    """Keeps what is said before the first step."""

    def __init__(self, stream: io.StringIO) -> None:
        self.stream = stream
        self.said: str | None = None

    def on_before_optimizer_step(self, *args: Any) -> None:
        if self.said is None:
            self.said = self.stream.getvalue()


def train(job: Job, mode: str, num_ranks: int, directory: Path) -> Result:
    """One run, on this rank."""
    stream = io.StringIO()
    listener = Listener(stream)
    options: dict[str, Any] = {}
    if job.shape.is_manual:
        options["strategy"] = "ddp_find_unused_parameters_true" if num_ranks > 1 else "auto"
    else:
        options["gradient_clip_val"] = 1.0
    if mode != WHOLE:
        options["accumulate_grad_batches"] = 2
    trainer = Trainer(
        run_dir=directory, accelerator="cpu", devices=num_ranks, split_batches=True,
        precision="64-true", callbacks=[listener],
        # Up to eight batches, which is all of them, and no files.
        fast_dev_run=8,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    model = job.make_model()
    with redirect_stdout(stream):
        trainer.fit(model, make_loader(job, mode))
    metrics = {name: value.clone() for name, value in trainer.callback_metrics.items()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return Result(weights, metrics, listener.said or "")


def make_loader(job: Job, mode: str) -> Any:
    data, collate = job.make_data(), job.shape.collate
    if mode == CUT:
        return BatchLoader(data, BATCH_SIZE, collate_fn=collate, accumulate_grad_batches=2)
    return DataLoader(data, BATCH_SIZE, collate_fn=collate)


def path_of(directory: Path, job: Job, mode: str, num_ranks: int) -> Path:
    """The file of a result."""
    index = SHAPES.index(job.shape)
    return directory / f"{index}-{job.is_mended:d}-{mode}-{num_ranks}.pt"


def read_results(directory: Path, job: Job) -> dict[tuple[str, int], Result]:
    """The results of a job that are there, by mode and number of ranks."""
    results = {}
    for num_ranks in MODES:
        for mode in modes_of(job.shape, num_ranks):
            path = path_of(directory, job, mode, num_ranks)
            if path.exists():
                results[mode, num_ranks] = Result(*torch.load(path))
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path, help="for the results")
    parser.add_argument("--devices", type=int, required=True, help="ranks")
    parser.add_argument("indices", nargs="*", type=int, help="of shapes")
    args = parser.parse_args()
    jobs = jobs_of([SHAPES[index] for index in args.indices])
    num_ranks = args.devices
    for number, job in enumerate(jobs, 1):
        for mode in modes_of(job.shape, num_ranks):
            path = path_of(args.directory, job, mode, num_ranks)
            result = train(job, mode, num_ranks, args.directory / "run")
            if environment.rank() == 0:
                torch.save(tuple(result), path)
        if environment.rank() == 0:
            print(f"{num_ranks} ranks, {number}/{len(jobs)}: {job.name}", flush=True)


if __name__ == "__main__":
    main()
