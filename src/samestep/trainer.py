"""``samestep.Trainer``: a ``lightning.Trainer`` that can be killed at any moment and continued."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger

from samestep.callbacks.best_checkpoint import BestCheckpoint
from samestep.callbacks.last_checkpoint import LastCheckpoint
from samestep.callbacks.loss_guard import LossGuard
from samestep.callbacks.run_state import progress_of
from samestep.engine import callbacks_of_run, patch, topology
from samestep.errors import ConfigError
from samestep.node import agent
from samestep.ranks import environment, failure, preflight, process_group, stopping
from samestep.run import directory, nodes, state
from samestep.run.checkpoint import AtomicCheckpointIO
from samestep.run.history import History
from samestep.run.records import log_to_files, silence_expected_warnings
from samestep.spec import RunSpec, describe

REJECTED = {
    "enable_checkpointing": (False, "a run continues from its checkpoints"),
    "barebones": (True, "a run needs its callbacks and its history"),
    "overfit_batches": (None, "it replaces the order of the data; limit_train_batches keeps it"),
    "reload_dataloaders_every_n_epochs": (None, "an interrupted epoch needs its own loader"),
}
"""Arguments of Lightning's Trainer that contradict a run, with the value that does: None is any."""


class Trainer(L.Trainer):
    """A ``lightning.Trainer`` whose runs take the same steps on any number of ranks, interrupted or not.

    ``fit`` begins the run in ``run_dir``, or continues it where it was; a finished run is not
    trained again, unless its limits are higher now. At SIGTERM, SIGINT or SIGHUP all ranks stop
    together between two steps, save ``last.ckpt``, and the process ends with the exit code of the
    signal. ``test``, ``validate`` and ``predict`` take the best checkpoint. Everything is written
    to ``run_dir``: ``config.yaml``, ``metrics.csv``, ``metrics.json``, ``checkpoints/``, ``logs/``.

    With several devices under plain ``python`` the ranks are started from here, and this process
    waits for them; under torchrun, ``samestep run`` or srun they are there already.

    Build it before the model: the constructor seeds torch, NumPy and ``random``.

    Args:
        run_dir: directory of the run; the same directory continues the same run.
        run_id: name of the run; None is the name of the directory.
        seed: of weights, order and random numbers.
        monitor: a metric that the model logs, which chooses ``best.ckpt``; None keeps only the last.
        mode: ``min`` or ``max`` of ``monitor``.
        config: values to save in ``config.yaml`` and to compare when the run continues; None takes
            the arguments of this Trainer and the hyperparameters of model and data.
        allow_changes: keys of ``config`` that may have another value than when the run began.
        timeout_s: seconds that a step may take, and that a rank waits for the others.
        save_every_s: seconds of training that a killed run repeats at most.
        shares: how much of each batch a rank gets: ``equal``, ``auto`` (measured), or numbers.
        max_skipped: steps with a nan or infinite gradient that are skipped; one more ends the run.
        callbacks: yours, besides those of every run.
        options: all other arguments of ``lightning.Trainer``.

    Raises:
        ConfigError: if an argument cannot be kept.
    """

    def __init__(
        self,
        *,
        run_dir: str | Path,
        run_id: str | None = None,
        seed: int = 0,
        monitor: str | None = None,
        mode: str = "min",
        config: Mapping[str, Any] | None = None,
        allow_changes: Sequence[str] = (),
        timeout_s: float = 300.0,
        save_every_s: float = 300.0,
        shares: str | Sequence[float] = "equal",
        max_skipped: int = 0,
        accelerator: str = "auto",
        strategy: Any = "auto",
        devices: int | str = "auto",
        num_nodes: int = 1,
        callbacks: L.Callback | Iterable[L.Callback] | None = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        plugins: Any = None,
        **options: Any,
    ) -> None:
        report_errors_in_one_line()
        check_options(options, run_dir)
        run_dir = Path(run_dir)
        self._spec = RunSpec(
            run_id=run_id or run_dir.absolute().name,
            run_dir=run_dir,
            seed=seed,
            config=dict(config or {}),
            accelerator=accelerator,
            devices=devices,
            num_nodes=num_nodes,
            strategy=strategy,
            sync_batchnorm=bool(options.get("sync_batchnorm")),
            deterministic=options.get("deterministic") is True,
            timeout_s=timeout_s,
            shares=shares if isinstance(shares, str) else tuple(shares),
            allow_changes=tuple(allow_changes),
            limits={k: v for k, v in options.items() if k.startswith("max_")},
            saves_nothing=bool(options.get("fast_dev_run")),
        )
        if (num := agent.num_processes(accelerator, devices, num_nodes)) > 1:
            # This process becomes torchrun's agent; the script begins again in each rank.
            sys.exit(agent.start_program(num, run_id=self._spec.run_id))
        environment.limit_threads()
        L.seed_everything(seed, workers=True, verbose=False)
        silence_expected_warnings()
