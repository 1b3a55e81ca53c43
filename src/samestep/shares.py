"""How much of each batch every rank gets: as ``cluster.shares`` says, or as it was measured.

The shares change neither the global batches nor the loss curve. They only let a slow rank have less
to do, so that the others need not wait for it.
"""

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from omegaconf import DictConfig

from samestep import build
from samestep.callbacks.share_out import NEEDS_BATCH_LOADER, ShareOut, order_of
from samestep.config.rules import SHARES as SHARES_RULE
from samestep.config.rules import fault_of_shares
from samestep.config.schema import plain
from samestep.errors import ConfigError
from samestep.ranks import environment, process_group
from samestep.ranks.preflight import Finding
from samestep.run.checkpoint import cannot_write
from samestep.run.directory import SHARES
from samestep.run.files import write_text
from samestep.run.records import cpu_name, read_json

WARMUP_STEPS = 3
TIMED_STEPS = 9  # at least
TIMED_S = 1.0  # seconds of quick steps: a moment in which a machine does something else is no share
MAX_TIMED_STEPS = 500
ALIKE = 1.1  # the fastest rank is at most so many times as fast as the slowest: equal shares


def decide(cfg: DictConfig, trainer: L.Trainer, datamodule: L.LightningDataModule | None) -> None:
    """Tell the callback ``ShareOut`` of ``trainer`` the share of each rank.

    Every rank must call this, before ``trainer.fit``. With ``auto`` the ranks are measured, and
    rank zero writes down the result. A run that continues on as many ranks of the same kind finds
    it there.

    Raises:
        ConfigError: on all ranks, if ``cluster.shares`` does not fit the ranks or the data.
    """
    share_out = next((c for c in callbacks_of(trainer) if isinstance(c, ShareOut)), None)
    if share_out is None or environment.world_size() == 1 or cfg.trainer.fast_dev_run:
        return
    asked = read_key(cfg)
    if isinstance(asked, list):
        share_out.shares = tuple(by_rank(asked))
    elif asked == "auto":
        share_out.shares = tuple(read_or_measure(cfg, datamodule))


def read_key(cfg: DictConfig) -> str | list[float]:
    """``cluster.shares`` of rank zero, on every rank: each node may have a command of its own."""
    shares: str | list[float] = process_group.broadcast(plain(cfg.cluster)["shares"])
    return shares


def callbacks_of(trainer: L.Trainer) -> list[L.Callback]:
    """The callbacks of a Trainer, with the type that Lightning does not declare."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def by_rank(shares: Sequence[float]) -> list[float]:
    """One share for each rank; shares of nodes are those of each of their ranks.

    Raises:
        ConfigError: if there is one neither for each rank nor for each node.
    """
    num_ranks, num_nodes = environment.world_size(), environment.num_nodes()
    if fault := fault_of_shares(shares, num_nodes, num_ranks):
        raise ConfigError(fault, on_all_ranks=True)
    if len(shares) == num_ranks:
        return list(shares)
    return [shares[node] for node in process_group.gather(environment.node_rank())]


def read_or_measure(cfg: DictConfig, datamodule: L.LightningDataModule | None) -> list[float]:
    """The shares that an earlier start of this run has measured on such ranks, or new ones."""
    path = Path(cfg.run_dir, SHARES)
    ranks = process_group.gather(describe_rank(cfg))
    shares = process_group.on_rank_zero(read_record, path, ranks)
    how = "measured by an earlier start"
    if shares is None:
        speeds = measure_ranks(cfg, datamodule)
        shares, how = shares_of(speeds), "measured"
        process_group.on_rank_zero(write_record, path, ranks, speeds, shares)
    if environment.rank() == 0:
        print(f"Shares of the ranks: {show(shares)} ({how}, {path})", flush=True)
    return shares


def describe_rank(cfg: DictConfig) -> str:
    """What decides how fast a rank is: its device, or the number of its processors."""
    if process_group.device_kind(cfg) == "cuda":
        return torch.cuda.get_device_name(environment.local_rank())
    return f"{cpu_name()}, {environment.cpus_per_rank()} processors"


def read_record(path: Path, ranks: list[str]) -> list[float] | None:
    """The shares that were measured on such ranks; None if there are none, or not readable."""
    for entry in reversed(read_json(path, list) or []):
        if not isinstance(entry, dict) or entry.get("ranks") != ranks:
            continue
        shares: Any = entry.get("shares")
        if SHARES_RULE.holds(shares) and len(shares) == len(ranks):
            return list(shares)
    return None


def write_record(path: Path, ranks: list[str], speeds: list[float], shares: list[float]) -> None:
    """Add what was measured."""
    entry = {"ranks": ranks, "samples_per_second": speeds, "shares": shares}
    entries = [*(read_json(path, list) or []), entry]
    try:
        write_text(path, json.dumps(entries, indent=2) + "\n")
    except OSError as error:
        raise cannot_write(path, error) from error


def shares_of(speeds: Sequence[float]) -> list[float]:
    """Shares in proportion to the speeds, the smallest 1; equal ones if the ranks are alike."""
    slowest = min(speeds)
    if slowest <= 0 or max(speeds) <= ALIKE * slowest:
        return [1.0] * len(speeds)
    return [round(speed / slowest, 2) for speed in speeds]


def show(shares: Sequence[float]) -> str:
    """The shares as a line of text."""
    return ", ".join(f"{share:g}" for share in shares)


def find(cfg: DictConfig, datamodule: L.LightningDataModule | None) -> list[Finding]:
    """What ``cluster.shares=auto`` would measure now, for the doctor; nothing is written down."""
    if environment.world_size() == 1 or read_key(cfg) != "auto":
        return []
    speeds = measure_ranks(cfg, datamodule)
    rates = ", ".join(f"{speed:,.0f}" for speed in speeds)
    return [Finding("shares", f"{show(shares_of(speeds))} (samples per second: {rates})")]


def measure_ranks(cfg: DictConfig, datamodule: L.LightningDataModule | None) -> list[float]:
    """Samples per second of each rank; all are measured at the same time.

    Each rank takes as many steps as the others, because at the end of an epoch a model may wait
    for the other ranks. The first steps say how many are enough.
    """
    process_group.gather(None)  # wait for the last rank
    measured = process_group.on_all_ranks(measure, cfg, datamodule, TIMED_STEPS)
    speeds, seconds = zip(*process_group.gather(measured), strict=True)
    slowest = max(seconds)  # 0 if the run has too few steps
    num_steps = min(int(TIMED_S / slowest), MAX_TIMED_STEPS) if slowest else 0
    if num_steps > TIMED_STEPS:
        measured = process_group.on_all_ranks(measure, cfg, datamodule, num_steps)
        speeds, _ = zip(*process_group.gather(measured), strict=True)
    return list(speeds)


def measure(
    cfg: DictConfig, datamodule: L.LightningDataModule | None, num_steps: int
) -> tuple[float, float]:
    """How fast this rank takes some training steps with its share, without the others.

    They are steps of a second model of the same configuration, under a Trainer of its own. The
    model, the optimizer, the random numbers and the order of the run are not touched.

    Returns:
        Samples per second, and seconds of a step: medians; 0 if the run has too few steps.
    """
    stopwatch = Stopwatch(num_steps)
    with isolate_rng(include_cuda=torch.cuda.is_available()):
        build.lone_trainer(cfg, stopwatch).fit(build.model(cfg), datamodule=datamodule)
    return stopwatch.medians()


class Stopwatch(L.Callback):
    """Ends the training after some steps, and says how fast they were.

    A step lasts from the end of the step before it to its own end: with the loading of its data.

    Args:
        num_steps: that are timed; some more are taken before, as warm-up.
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._num_taken = 0
        self._end = 0.0  # of the step before
        self._seconds: list[float] = []
        self._speeds: list[float] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse data whose shares cannot be changed."""
        if order_of(trainer) is None:
            raise ConfigError(NEEDS_BATCH_LOADER)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Note the time."""
        if pl_module.device.type != "cpu":
            torch.accelerator.synchronize(pl_module.device)
        start, self._end = self._end, time.perf_counter()
        order = order_of(trainer)
        self._num_taken += 1
        if order is None or self._num_taken <= WARMUP_STEPS:
            return
        self._seconds.append(self._end - start)
        self._speeds.append(order.lengths(batch_idx)[order.rank] / self._seconds[-1])
        trainer.should_stop = len(self._seconds) >= self.num_steps

    def medians(self) -> tuple[float, float]:
        """Samples per second, and seconds of a step; 0 if there were too few steps."""
        if not self._seconds:
            return 0.0, 0.0
        return statistics.median(self._speeds), statistics.median(self._seconds)
