"""``samestep.Trainer``: a ``lightning.Trainer`` that can be killed at any moment and continued.

What happens, from ``fit`` to the end: the ranks meet; the machine is examined; the run directory is
opened, and the newest valid checkpoint found; Lightning trains, with the callbacks of
``callbacks_of_run`` beside the user's own; between two steps all ranks save or stop together; at
the end the final metrics are written. ``samestep.hydra.build`` makes the same run from a
DictConfig.
"""

import inspect
import json
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import Logger

from samestep import ending, loops
from samestep.callbacks.attributes import Attributes
from samestep.callbacks.checkpoints import Checkpoints
from samestep.callbacks.checks import MonitorCheck, SameWeights, check_supported
from samestep.callbacks.data_resume import DataResume
from samestep.callbacks.hparams_on_resume import HparamsOnResume
from samestep.callbacks.loss_guard import LossGuard
from samestep.callbacks.rank_state import RankState
from samestep.callbacks.rng import SeedSteps
from samestep.callbacks.run_stats import RunStats
from samestep.callbacks.slice_weighting import SliceWeighting
from samestep.callbacks.watchdog import Watchdog
from samestep.errors import ConfigError
from samestep.loggers import NullLogger
from samestep.node import agent
from samestep.ranks import (
    compat,
    environment,
    failure,
    preflight,
    process_group,
    stopping,
)
from samestep.ranks.secrets import redact_values
from samestep.ranks.sharded import class_of
from samestep.run import directory, nodes, record
from samestep.run.checkpoint import AtomicCheckpointIO, to_plain
from samestep.run.history import History
from samestep.run.logs import log_to_files, silence_expected_warnings
from samestep.run.metrics import read_final_metrics
from samestep.run_spec import RunSpec

CONTRADICTIONS: dict[str, tuple[Any, str]] = {
    "enable_checkpointing": (False, "a run continues from its checkpoints"),
    "barebones": (True, "a run needs its callbacks and its history"),
    "overfit_batches": (None, "it replaces the order of the data; use limit_train_batches"),
    "reload_dataloaders_every_n_epochs": (None, "an interrupted epoch needs its own loader"),
    "default_root_dir": (None, "a run writes to run_dir"),
}
"""Arguments of Lightning's Trainer that a run cannot have, as long as they have this value (None:
any but zero), and why."""
STRATEGY = re.compile(
    r"auto|ddp(_find_unused_parameters_(true|false))?|fsdp|.*\.\w*(?<!DeepSpeed)(?<!FSDP)(?<!ModelParallel)Strategy"
)
"""Names of strategies, and of the types of objects, whose checkpoints are whole."""


class Trainer(L.Trainer):
    """A ``lightning.Trainer`` that takes the same steps on any number of ranks, interrupted or not.

    ``fit`` starts the run in ``run_dir``, or resumes it. A finished run is not trained again,
    unless a limit such as ``max_epochs`` was raised. At SIGTERM, SIGINT or SIGHUP all ranks stop
    together between two steps and save; the process ends with the exit code of the signal, such as
    143. ``test``, ``validate`` and ``predict`` use the best checkpoint. Everything is in
    ``run_dir``: ``config.yaml``, metrics, ``checkpoints`` and ``logs``.

    With several devices under plain ``python``, this process becomes the agent that starts the
    script once for each rank. Under ``samestep run``, torchrun or srun the ranks already run.

    Build it before the model: the constructor seeds torch, NumPy and Python's ``random``.

    Args:
        run_dir: directory of the run; the same directory continues the same run.
        run_id: name of the run; None: the name of the directory.
        seed: of weights, order and random numbers.
        monitor: a metric that the model logs, which chooses ``best.ckpt``; None: the last weights
            are tested.
        mode: ``min`` if a lower ``monitor`` is better, ``max`` if a higher one is.
        config: values that are saved, and compared when the run continues; None takes the arguments
            of this Trainer, and the hyperparameters of model and data.
        allow_changes: full keys of ``config`` that may have changed when the run continues.
        notes: what the run is about, for people; a run that continues keeps its own.
        tags: words that mark the run in lists; kept likewise.
        timeout_s: seconds that a step may take, and that a rank waits for the others.
        save_every_s: seconds of training that a killed run repeats at most.
        max_skipped: steps with a nan or infinite gradient that are skipped; one more ends the run.
        shares: how much of each batch a rank gets: ``equal``, ``auto``, or numbers.
        split_batches: let ``batch_size`` of ordinary DataLoaders count samples per step over all
            ranks, each of which gets a slice of every batch; otherwise it counts them per rank.
        accelerator: as in Lightning; so are the next ones, and ``options``.
        strategy: ``auto``, ``ddp``, a variant of it, ``fsdp`` (a model in parts, one on each rank),
            or an object whose checkpoints are whole.
        devices: processes on each node.
        num_nodes: machines.
        callbacks: yours, in addition to those of every run.
        logger: trackers beside ``metrics.csv``; None, True and False mean none.
        plugins: Lightning's plugins, except cluster environments.
        options: all other arguments of ``lightning.Trainer``.

    Raises:
        ConfigError: if a run with this argument could not be resumed.
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
        notes: str = "",
        tags: Sequence[str] = (),
        timeout_s: float = 300.0,
        save_every_s: float = 300.0,
        max_skipped: int = 0,
        shares: str | Sequence[float] = "equal",
        split_batches: bool = False,
        accelerator: str = "auto",
        strategy: Any = "auto",
        devices: int | str = "auto",
        num_nodes: int = 1,
        callbacks: list[L.Callback] | L.Callback | None = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        plugins: Any = None,
        **options: Any,
    ) -> None:
        failure.ErrorHook.install()
        check_options({**options, "strategy": strategy})
        environment.use_srun_ranks()
        run_dir = Path(run_dir)
        own = [callbacks] if isinstance(callbacks, L.Callback) else list(callbacks or [])
        check_callbacks(own, run_dir)
        # What may end a run; a finished one continues if it is higher.
        limits = {name: value for name, value in options.items() if name.startswith("max_")}
        stoppers = [callback for callback in own if isinstance(callback, EarlyStopping)]
        limits |= {f"patience of {stopper.monitor}": stopper.patience for stopper in stoppers}
        is_cli = any(type(callback).__name__ == "SaveConfigCallback" for callback in own)
        self.spec = RunSpec(
            run_id=run_id or run_dir.absolute().name,
            run_dir=run_dir,
            seed=seed,
            accelerator=accelerator,
            devices=devices,
            num_nodes=num_nodes,
            strategy=strategy if isinstance(strategy, str) else name_of_class(strategy),
            sync_batchnorm=bool(options.get("sync_batchnorm")),
            deterministic=options.get("deterministic") is True,
            timeout_s=timeout_s,
            shares=shares,
            split_batches=split_batches,
            allow_changes=tuple(allow_changes),
            notes=notes,
            tags=tuple(tags),
            override_hint="--trainer.allow_changes=" if is_cli else "allow_changes=",
            limits=limits,
            saves_nothing=bool(options.get("fast_dev_run")),
        )
        """The facts of this run."""
        if (num_processes := agent.num_processes(accelerator, devices, num_nodes)) > 1:
            # This process becomes the agent, and the script begins again in each rank.
            sys.exit(agent.start(agent.this_program(), num_processes, run_id=self.spec.run_id))
        environment.limit_threads()
        silence_expected_warnings()
        L.seed_everything(seed, workers=True, verbose=False)

        self._config = config
        # LightningCLI passes all arguments, so only those that differ from the defaults count.
        defaults = inspect.signature(L.Trainer).parameters
        given = {k: v for k, v in options.items() if k not in defaults or v != defaults[k].default}
        self._options = {"monitor": monitor, "mode": mode, **given}
        if split_batches:
            self._options["split_batches"] = True
        self._model: L.LightningModule | None = None
        self._history = History(run_dir)
        folder = str(run_dir / "checkpoints")
        checkpoints = Checkpoints(folder, save_every_s, monitor, mode)
        chosen = [checkpoints, LossGuard(max_skipped), *own]
        monitors = {"monitor": monitor} if monitor else {}
        accumulates = options.get("accumulate_grad_batches", 1) > 1
        # True would be Lightning's own choice, and a run has metrics.csv.
        trackers = [] if logger is None or isinstance(logger, bool) else logger
        trackers = [trackers] if isinstance(trackers, Logger) else [*trackers]
        trackers = trackers or [NullLogger(str(run_dir))]
        # Under torchrun its ranks count, and not what the script says.
        where = {"devices": devices, "num_nodes": num_nodes, "strategy": strategy}
        where |= process_group.topology(self.spec)
        plugins = plugins if isinstance(plugins, (list, tuple)) else [plugins] if plugins else []
        super().__init__(
            accelerator=accelerator,
            callbacks=callbacks_of_run(
                self.spec, self._history, checkpoints, chosen, monitors, accumulates
            ),
            logger=[*trackers, self._history],
            plugins=[AtomicCheckpointIO(), *where.pop("plugins", []), *plugins],
            default_root_dir=run_dir,
            **where,
            **options,
        )
        compat.apply(self)
        loops.install(self)

    def fit(
        self,
        model: L.LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: L.LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Begin the run, or continue it where it was; leave a finished one alone.

        Raises:
            ConfigError: if ``run_dir`` holds another run, or a setting cannot be run.
            RunError: if the run cannot continue.
            Stopped: a ``SystemExit``, after a signal and after saving.
        """
        if ckpt_path not in (None, "last", "best", "hpc"):
            raise ConfigError(
                f"ckpt_path={ckpt_path}: a run continues from its own checkpoints in "
                f"{self.spec.run_dir}; to start from other weights, load them into the model"
            )
        fit = super().fit
        loaders = train_dataloaders, val_dataloaders, datamodule
        with self._meeting():
            if self.spec.saves_nothing:
                return fit(model, *loaders)
            self._model = model
            data = datamodule or train_dataloaders
            self.spec = replace(self.spec, config=self._describe(model, data))
            preflight.run(self.spec, model, data)
            start = nodes.begin(self.spec, [*sys.argv])
            if start.finished:
                if self.is_global_zero:
                    print(f"Nothing to do, the run in {self.spec.run_dir} is finished.", flush=True)
                return None
            with (
                ending.recorded(self.spec, self),
                directory.full_disk_is_one_message(self.spec.run_dir),
            ):
                log_to_files(self.spec.run_dir)
                fit(model, *loaders, ckpt_path=start.ckpt_path)
                stopping.check()
                if self.is_global_zero:
                    directory.finish(self.spec, self._history.last())
                    print(f"Finished: {self.spec.run_dir}", flush=True)
        return None

    def test(self, *args: Any, **options: Any) -> Any:
        """Test the best checkpoint, or with ``monitor=None`` the last; add to ``metrics.json``."""
        results = self._evaluate(super().test, args, options)
        if self.is_global_zero and directory.is_finished(self.spec):
            figures = {name: value for result in results for name, value in result.items()}
            directory.finish(self.spec, (read_final_metrics(self.spec.run_dir) or {}) | figures)
        return results

    def validate(self, *args: Any, **options: Any) -> Any:
        """Validate the best checkpoint, or with ``monitor=None`` the last one."""
        return self._evaluate(super().validate, args, options)

    def predict(self, *args: Any, **options: Any) -> Any:
        """Predict with the best checkpoint, or with ``monitor=None`` with the last one."""
        return self._evaluate(super().predict, args, options)

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """Meet the other ranks, if they have not met; an error within ends all of them."""
        if threading.current_thread() is threading.main_thread() and not stopping.is_installed():
            stopping.install()
        preflight.find_rank_zero(self.spec.accelerator, self.spec.timeout_s)
        process_group.init(self.spec.accelerator, self.spec.timeout_s)
        # torch has just put a hook around ours: it would swallow the line before the exit code.
        failure.ErrorHook.install()
        try:
            with process_group.shared_errors():
                yield
                # The script goes on alone: from here on a signal ends it at once.
                stopping.defer(False)
        finally:
            # Also after an error, which a notebook survives. A rank keeps its handlers: its agent
            # stops all ranks when the first fails, and this one may have to print why.
            if not environment.under_torchrun():
                stopping.uninstall()
                # Lightning tears down no callback after an error.
                for watchdog in compat.callbacks_of(self, Watchdog):
                    watchdog.stop()

    def _evaluate(self, function: Callable[..., Any], args: Any, options: Any) -> Any:
        """Call a function of Lightning's Trainer with the checkpoint of this run."""
        given = inspect.signature(function).bind(*args, **options).arguments
        given["model"] = given.get("model") or self._model
        asked = given.get("ckpt_path")
        with self._meeting():
            if asked in (None, "best", "last") and not self.spec.saves_nothing:
                path = None if asked == "last" else nodes.best_checkpoint(self.spec)
                given["ckpt_path"] = path or nodes.last_checkpoint(self.spec)
                self._history.read(record.read(self.spec.run_dir))
            return function(**given)

    def _describe(self, model: L.LightningModule, data: Any) -> dict[str, Any]:
        """What ``config.yaml`` holds, and what is compared when the run continues."""
        described: dict[str, Any] = {"seed": self.spec.seed, "trainer": self._options}
        for name, part in ("model", model), ("data", data):
            described[name] = {"class": name_of_class(part)}
            if isinstance(getattr(part, "batch_size", None), int):  # of a DataLoader
                described[name]["batch_size"] = part.batch_size
            saved = dict(getattr(part, "hparams", {}))
            # LightningCLI adds a key of its own, which begins with an underscore.
            described[name] |= {k: v for k, v in saved.items() if not str(k).startswith("_")}
        # As YAML can hold it; of objects, such as an activation, the name of their class.
        text = json.dumps(
            to_plain(self._config or described), default=lambda o: type(o).__qualname__
        )
        config: dict[str, Any] = redact_values(json.loads(text))
        return config


def callbacks_of_run(
    spec: RunSpec,
    history: History,
    checkpoints: Checkpoints | None,
    chosen: Sequence[L.Callback],
    monitors: Mapping[str, str],
    accumulates: bool,
) -> list[L.Callback]:
    """The callbacks of every run, and those that were chosen, in the order in which they act.

    Args:
        spec: of the run.
        history: gets the metrics.
        checkpoints: one of ``chosen``; None: the run saves nothing.
        chosen: what the user configures.
        monitors: the metrics that must be logged, by the key that names each.
        accumulates: whether an optimizer step has several batches.
    """
    # Equal slices need no weights; one rank and one batch in a step have no others.
    has_slices = environment.world_size() > 1 or accumulates or spec.split_batches
    # It writes a log.
    watchdogs = [] if spec.saves_nothing else [Watchdog(spec.timeout_s, str(spec.run_dir))]
    return [
        history,
        *watchdogs,
        SeedSteps(spec.seed),
        DataResume(spec.seed),
        RankState(),
        *([SliceWeighting(spec.shares, spec.split_batches, spec.seed)] if has_slices else []),
        HparamsOnResume(),
        RunStats(),
        SameWeights(),
        MonitorCheck(monitors),
        *chosen,
        Attributes(),
    ]


def check_options(options: Mapping[str, Any]) -> None:
    """Raise a ConfigError for the first argument that contradicts what a run is."""
    for name, (wrong, why) in CONTRADICTIONS.items():
        value = options.get(name)
        if value is not None and (value == wrong or (wrong is None and value)):
            raise ConfigError(f"{name}={value}: is not supported: {why}")
    strategy = options["strategy"]
    if not STRATEGY.fullmatch(strategy if isinstance(strategy, str) else name_of_class(strategy)):
        raise ConfigError(
            f"strategy={strategy}: is not supported: the checkpoints of a run are whole, and its "
            "ranks are started by samestep; use auto, ddp, ddp_find_unused_parameters_true or fsdp"
        )


def check_callbacks(callbacks: Iterable[L.Callback], run_dir: Path) -> None:
    """Give checkpoints and files of the user's callbacks a place beside those of the run.

    Raises:
        ConfigError: if they would take the places of the run's own.
    """
    for callback in callbacks:
        check_supported(callback, "callbacks")
        if isinstance(callback, Checkpoints):
            raise ConfigError(f"callbacks: the Trainer has its own {type(callback).__name__}")
        if isinstance(callback, ModelCheckpoint):
            folder = Path(callback.dirpath or run_dir / "model_checkpoints")
            if folder.absolute() == (run_dir / "checkpoints").absolute():
                raise ConfigError(
                    f"callbacks: ModelCheckpoint(dirpath={callback.dirpath}): is not supported: "
                    "the checkpoints of the run are there; leave dirpath out"
                )
            callback.dirpath = str(folder)
        if type(callback).__name__ == "SaveConfigCallback":  # of LightningCLI
            callback.config_filename = "cli.yaml"  # type: ignore[attr-defined]
            callback.overwrite = True  # type: ignore[attr-defined]  # the run continues


def name_of_class(thing: object) -> str:
    """The full name of the class of an object."""
    kind = class_of(thing)
    return f"{kind.__module__}.{kind.__qualname__}"
