"""Names the ranks for which all others wait in each step, and what these wait for."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch

from samestep.callbacks.notes import print_note
from samestep.plugins import wall_time
from samestep.ranks import collectives, environment
from samestep.run import record
from samestep.run_spec import RunSpec

BLOCKS = 5
BLOCK_STEPS = 10
"""A rank must be slow in each of the blocks, so that no single hiccup names it."""
FACTOR = 1.2  # times as long as the others
SHARE = 0.1  # of the time of a step that the others lose, at least
LEAST_S = 0.001  # of each step: less is noise
DATA, FORWARD = "data", "forward"
WORDS = {DATA: "waits for its data", FORWARD: "computes its forward pass"}


class Slow(NamedTuple):
    """A rank for which the others wait."""

    rank: int
    cause: str
    """``data`` or ``forward``."""
    step_s: float
    """Seconds of a step that it takes for this."""
    others_s: float
    """The median of the other ranks."""

    def describe(self) -> str:
        """The note."""
        own, others = 1000 * self.step_s, 1000 * self.others_s
        return (
            f"Note: rank {self.rank} is slow: it {WORDS[self.cause]} for {own:.1f} ms in each "
            f"step, the others for {others:.1f} ms; all ranks wait for it"
        )


def callback(spec: RunSpec) -> L.Callback | None:
    """``SlowRanks``, if there are several."""
    if environment.world_size() == 1:
        return None
    run_dir = None if spec.saves_nothing else spec.run_dir
    return SlowRanks(run_dir, waits_in_forward=spec.is_fsdp or spec.sync_batchnorm)


class SlowRanks(L.Callback):
    """Prints one note for each rank that is slow for 50 batches, and adds it to ``run.json``.

    Each rank measures how long it waits for its data, and how long its forward pass takes: until
    the backward pass, in which all ranks wait for the slowest. Every 50 batches the ranks exchange
    what they have measured. No batch waits for a GPU: there it is the time in which the process
    starts the forward pass.

    Args:
        run_dir: directory of the run; None leaves no record.
        waits_in_forward: whether ranks wait for each other in the forward pass, as with FSDP: then
            it is the fast ones that take long.
    """

    def __init__(self, run_dir: Path | None, *, waits_in_forward: bool = False) -> None:
        self.run_dir = run_dir
        self.waits_in_forward = waits_in_forward
        self._named: set[tuple[int, str]] = set()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to measure."""
        self._clock = wall_time.current()
        self._blocks: list[list[float]] = []
        self._begin_block()

    def on_train_batch_start(self, *args: Any) -> None:
        """Begin to time the forward pass."""
        self._step_began = time.perf_counter()

    def on_before_backward(self, *args: Any) -> None:
        """Add the time of the forward pass."""
        if not self.waits_in_forward:
            self._forward_s += time.perf_counter() - self._step_began

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Compare with the other ranks, when the last of 50 batches ends. Every rank calls this."""
        self._num_batches += 1
        if self._num_batches < BLOCK_STEPS:
            return
        waited_s = self._clock.waited_s - self._waited_before
        all_s = time.perf_counter() - self._block_began
        self._blocks.append([waited_s, self._forward_s, all_s])
        if len(self._blocks) == BLOCKS:
            # All ranks take the same batches, so all are here. Between CPUs, and once in 50.
            of_ranks = collectives.all_gather(torch.tensor(self._blocks))
            self._blocks = []
            for slow in find_slow([table.tolist() for table in of_ranks]):
                self._name(trainer, slow)
        # After the exchange, which is no part of a step.
        self._begin_block()

    def _begin_block(self) -> None:
        self._num_batches = 0
        self._forward_s = 0.0
        self._waited_before = self._clock.waited_s
        self._block_began = time.perf_counter()

    def _name(self, trainer: L.Trainer, slow: Slow) -> None:
        # It may stay slow for days.
        if (slow.rank, slow.cause) in self._named:
            return
        self._named.add((slow.rank, slow.cause))
        print_note(trainer, slow.describe())
        if trainer.is_global_zero and self.run_dir is not None:
            known = record.read(self.run_dir).slow_ranks
            entry = {**slow._asdict(), "step": trainer.global_step}
            record.try_to_update(self.run_dir, record.RUNNING, slow_ranks=[*known, entry])


def find_slow(of_ranks: Sequence[Sequence[Sequence[float]]]) -> list[Slow]:
    """The ranks that are slow in every block.

    Args:
        of_ranks: by rank, for each block the seconds of its data, of its forward passes, and all.
    """
    found = []
    for rank, own in enumerate(of_ranks):
        others = [blocks for other, blocks in enumerate(of_ranks) if other != rank]
        for column, cause in enumerate((DATA, FORWARD)):
            medians = []
            for number in range(len(own)):
                # Of the others: of two ranks, the median of both is their mean.
                medians.append(statistics.median(blocks[number][column] for blocks in others))
            if is_slow(own, column, medians):
                steps = BLOCK_STEPS * len(own)
                own_s = sum(block[column] for block in own) / steps
                found.append(Slow(rank, cause, own_s, sum(medians) / steps))
    return found


def is_slow(own: Sequence[Sequence[float]], column: int, medians: Sequence[float]) -> bool:
    """Whether a rank takes much longer than the others in every block."""
    for block, median in zip(own, medians, strict=True):
        # Twice nothing is nothing: what counts is also what the others lose.
        least_s = max(SHARE * block[-1], LEAST_S * BLOCK_STEPS)
        if block[column] < FACTOR * median or block[column] - median < least_s:
            return False
    return True
