"""``samestep.Trainer``: a ``lightning.Trainer`` that can be killed at any moment and continued.

What happens, from ``fit`` to the end: the ranks meet; the data are set up; the machine is examined;
the run directory is opened, and the newest valid checkpoint found; Lightning trains, with the
callbacks of ``callbacks_of_run`` beside the user's own; between two steps all ranks save or stop
together; at the end the final metrics are written.

This is the only build of a run: a script types the arguments of this class, LightningCLI takes them
from its command line, and ``samestep.hydra.build`` from a DictConfig.
"""

import inspect
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from samestep import arguments, fit_checks, loops, option_names, plugin
from samestep.callbacks.checkpoints import Checkpoints, keep_scores, progress_of
from samestep.callbacks.data_resume import DataResume
from samestep.callbacks.display import ShowsProgress
from samestep.callbacks.hparams_on_resume import HparamsOnResume
from samestep.callbacks.machine import Machine
from samestep.callbacks.objects import Objects
from samestep.callbacks.rank_state import RankState, find_deciders
from samestep.callbacks.rng import SeedSteps
from samestep.callbacks.run_state import RunState
from samestep.callbacks.slice_weighting import SliceWeighting, given_shares
from samestep.callbacks.stand_ins import StandIns
from samestep.callbacks.watchdog import Watchdog
from samestep.errors import ConfigError
from samestep.heap.hyperparameters import describe
from samestep.plugin import Given
from samestep.ranks import (
    compat,
    ddp,
    environment,
    epoch_logs,
    failure,
    gradients,
    meeting,
    output,
    process_group,
    run_dirs,
    stopping,
    strategies,
    virtual,
)
from samestep.ranks.devices import sum_of_bits
from samestep.ranks.process_group import on_rank_zero
from samestep.ranks.secrets import redact_values
from samestep.run import checkpoint, lifecycle, phases, record, weights
from samestep.run.checkpoint import AtomicCheckpointIO, read_without_tensors
from samestep.run.copies import KeepsCopy
from samestep.run.history import History
from samestep.run.layout import LAST, shorten
from samestep.run.logs import log_to_files, silence_expected_warnings
from samestep.run.metrics import read_final_metrics
from samestep.run.save_interval import AUTO, Seconds
from samestep.run_spec import RunSpec
from samestep.tracker import NullLogger


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
        run_dir: directory of the run; its name is that of the run, and the same directory continues
            the same run. ``~`` is the home directory. It is fixed here: a later ``chdir`` does not
            move it, and all ranks must name the same one.
        seed: of weights, order and random numbers.
        monitor: a metric that the model logs, which chooses ``best.ckpt``; None: the last weights
            are tested.
        mode: ``min`` if a lower ``monitor`` is better, ``max`` if a higher one is; no default.
        config: values that are saved, and compared when the run continues; None takes the arguments
            of this Trainer, and the hyperparameters of model and data. ``notes`` (free text) and
            ``tags`` (a list) in it are kept, and may change.
        allow_changes: full keys of ``config`` that may have changed when the run continues.
        timeout_s: seconds that a step may take, and that a rank waits for the others.
        save_every_s: seconds of training that a killed run repeats at most; ``auto``: saves cost
            one percent of the time of training, and come every 2 to 300 s.
        notice: what announces that this machine will be taken away, after which the run saves at
            once and goes on: ``file:PATH`` (a file that appears), ``aws``, ``gcp``, or a function
            that returns the text of a notice, or None.
        shares: how much of each batch a rank gets: ``equal``, ``auto``, or numbers.
        split_batches: let ``batch_size`` of ordinary DataLoaders count samples per step over all
            ranks, each of which gets a slice of every batch; otherwise it counts them per rank.
        virtual_ranks: how many slices each batch is cut into, whatever the number of ranks up to
            this one: a step has the same bits on any of them. Each slice is a batch of its own, as
            that of a rank is. None: one slice for each rank.
        allow: notes about steps that differ on another number of ranks, which are known and not
            printed: ``loss``, ``random_numbers``, ``batch_norm``.
        accelerator: as in Lightning; so are the next ones, and ``options``.
        strategy: ``auto``, ``ddp``, a variant of it, ``fsdp`` (a model in parts, one on each rank),
            or an object whose checkpoints are whole.
        devices: processes on each node, each with a GPU if there are any; ``auto`` or -1, one for
            each GPU; or the numbers of GPUs, such as ``[1, 3]`` or ``"1,3"``.
        num_nodes: machines.
        callbacks: yours, in addition to those of every run. A ``Checkpoints`` or ``LossGuard``
            among them takes the place of the default one.
        logger: trackers beside ``metrics.csv``; None, True and False mean none.
        plugins: Lightning's plugins, except cluster environments.
        run: internal, a ``RunSpec``: what a front end such as ``samestep.hydra`` adds.
        options: all other arguments of ``lightning.Trainer``.

    Raises:
        ConfigError: if a run with this argument could not be resumed.
    """

    def __init__(
        self,
        *,
        run_dir: str | Path,
        seed: int = 0,
        monitor: str | None = None,
        mode: str | None = None,
        config: Mapping[str, Any] | None = None,
        allow_changes: Sequence[str] = (),
        timeout_s: float = 300.0,
        save_every_s: Seconds = AUTO,
        notice: str | Callable[[], str | None] | None = None,
        shares: str | Sequence[float] = "equal",
        split_batches: bool = False,
        virtual_ranks: int | None = None,
        allow: Sequence[str] = (),
        accelerator: str = "auto",
        strategy: Any = "auto",
        devices: int | str | Sequence[int] = "auto",
        num_nodes: int = 1,
        callbacks: list[L.Callback] | L.Callback | None = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
        plugins: Any = None,
        run: Any = None,
        **options: Any,
    ) -> None:
        failure.ErrorHook.install()
        output.make_streams_safe()
        run_dir = run_dirs.fix(run_dir)
        added = run or front_end_of_script(run_dir, arguments.as_list(callbacks))
        option_names.use(added.option_names, added.option_words)
        given = plugin.change(
            Given(
                run_dir, run, accelerator, devices, num_nodes, callbacks, logger, allow, options
            )
        )  # fmt: skip
        run_dir, run, accelerator, devices, num_nodes, callbacks, logger, allow, options = given
        own = arguments.as_list(callbacks)
        added = run or front_end_of_script(run_dir, own)
        arguments.check_options({**options, "strategy": strategy, "monitor": monitor, "mode": mode})
        plugins, unused = arguments.take_unused(options, plugins, run_dir)
        environment.use_srun_ranks()
        self.spec: RunSpec = replace(
            added,
            run_dir=run_dir,
            seed=seed,
            accelerator=accelerator,
            devices=devices,
            num_nodes=None if added.is_elastic else num_nodes,
            strategy=strategies.name_of(strategy),
            sync_batchnorm=bool(options.get("sync_batchnorm")),
            deterministic=options.get("deterministic") is True,
            timeout_s=timeout_s,
            shares=shares,
            split_batches=split_batches,
            virtual_ranks=virtual_ranks,
            notice=notice,
            accumulates=options.get("accumulate_grad_batches", 1) > 1,
            allow=tuple(allow),
            allow_changes=tuple(allow_changes),
            limits=arguments.limits_of(own, options),
            saves_nothing=bool(options.get("fast_dev_run")),
        )
        """The facts of this run."""
        # With several devices under plain Python this process becomes the agent of the ranks, in
        # which the script begins again.
        plugin.call("start_ranks", self.spec, num_nodes)
        phases.switch(phases.START)
        # Not before: the process of the agent is no rank, and rank zero prints the notes.
        arguments.note_unused(unused)
        arguments.place_callbacks(own, run_dir)
        environment.limit_threads()
        virtual.check(virtual_ranks)
        silence_expected_warnings()
        L.seed_everything(seed, workers=True, verbose=False)

        self.results: dict[str, float] = {}
        """The final metrics, as in ``metrics.json``; empty on ranks other than zero."""
        # A library's Trainer may have attributes of its own: scvi-tools sets `_model`.
        self._module: L.LightningModule | None = None
        self._is_given = False
        self._left: tuple[L.LightningModule | None, list[int]] = None, []
        self._test_follows = False
        self._was_finished = False
        self._has_trained = False  # in this process
        self._history = History(run_dir)
        self._has_config = bool(added.config)
        self._config = config
        self._described = describe_options(
            options, monitor, mode, split_batches=split_batches, virtual_ranks=virtual_ranks
        )
        self._own = own
        chosen = arguments.complete_callbacks(own, run_dir, save_every_s, monitor, mode)
        # A bar of Lightning would be the second one.
        if compat.of_kind(own, ShowsProgress):
            options.setdefault("enable_progress_bar", False)
        trackers = arguments.trackers_of(logger) or [NullLogger(str(run_dir))]
        for known in plugin.loggers_of(trackers, run_dir):
            known.take_places()
        # Under torchrun its ranks count, and not what the script says.
        where = {"devices": devices, "num_nodes": num_nodes, "strategy": strategy}
        where |= strategies.topology(self.spec, strategy)
        environments = where.pop("plugins", [])
        super().__init__(
            accelerator=accelerator,
            callbacks=callbacks_of_run(self.spec, self._history, chosen),
            logger=[*trackers, self._history],
            plugins=[AtomicCheckpointIO(), *environments, *plugins],
            default_root_dir=run_dir,
            **where,
            **options,
        )
        # Lightning would ask the first logger for a folder, and a tracker may have none.
        profiler = self.profiler  # type: ignore[attr-defined]
        profiler.dirpath = profiler.dirpath or run_dir
        compat.apply(self)
        if virtual_ranks is None:
            ddp.apply(self)
        gradients.clip_by_known_norm(self)
        loops.install(self)
        self._options = dict(options)
        self._limits_of_loop = self._read_limits()

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
            RunError: if the data are missing or damaged, or the run cannot continue.
            Stopped: a ``SystemExit``, after a signal and after saving.
        """
        if ckpt_path not in (None, "last", "best", "hpc"):
            raise ConfigError(
                f"ckpt_path={ckpt_path}: a run continues from its own checkpoints in "
                f"{self.spec.run_dir}; to start from other weights, load them into the model"
            )
        # Lightning takes a DataModule in the place of the loaders, too.
        if isinstance(train_dataloaders, L.LightningDataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        model = fit_checks.unwrap_compiled(model)
        self._module = model
        self._was_finished = False
        phases.switch(phases.START)
        self._take_new_limits()
        with self._session():
            self._check_before_run(model, train_dataloaders, datamodule)
            ckpt_path = None
            if not self.spec.saves_nothing:
                argv = [*(self.spec.command or sys.argv)]
                copies = compat.callbacks_of(self, KeepsCopy)
                start = lifecycle.begin(self.spec, argv, copies, plugin.find("note_start"))
                if start.finished:
                    self._leave_alone()
                    return
                ckpt_path = start.ckpt_path
                if ckpt_path is not None:
                    self._announce_lost_weights(model)
            if ckpt_path is not None:
                # The run has had its sanity check. Another one would change again what a validation
                # changes, such as a buffer; Lightning skips it only within an epoch.
                self.num_sanity_val_steps = 0
            with self._recorded(ends_run=not self._test_follows):
                if not self.spec.saves_nothing:
                    self._begin_logs(ckpt_path)
                self._has_trained = True
                with fit_checks.already_set_up(datamodule):
                    loaders = train_dataloaders, val_dataloaders, datamodule
                    super().fit(model, *loaders, ckpt_path=ckpt_path)
                self._left = model, sums_of_weights(model)
                stopping.check()
                if not self._test_follows:
                    self._finish(self._history.last())

    def test(self, *args: Any, **options: Any) -> Any:
        """Test the best checkpoint, or with ``monitor=None`` the last; add to ``metrics.json``.

        Without a ``test_step`` or data for it there is nothing to test, and a note says so.
        """
        # A run whose front end tests it once is left alone when both are done.
        if self._was_finished and self.spec.ends_with_test:
            return []
        given = self._arguments(super().test, args, options)
        data = given.get("datamodule")
        if given.get("dataloaders") is None and not fit_checks.has_test(given["model"], data):
            if self.is_global_zero:
                print("Note: there is no test_step or no test_dataloader, so nothing is tested")
            return []
        if not self._test_follows:
            with self._session(), fit_checks.user_errors("Trainer"):
                results = self._evaluate(super().test, given)
            if self.is_global_zero and lifecycle.is_finished(self.spec):
                known = read_final_metrics(self.spec.run_dir) or {}
                lifecycle.finish(self.spec, known | self._tested())
                self._flush_copies()
            return results
        # The summary of the run has the metrics.
        given.setdefault("verbose", False)
        with self._session(), self._recorded(ends_run=True):
            results = self._evaluate(super().test, given)
            self._finish(self._history.last() | self._tested())
        return results

    def validate(self, *args: Any, **options: Any) -> Any:
        """Validate the best checkpoint, or with ``monitor=None`` the last one."""
        given = self._arguments(super().validate, args, options)
        with self._session(), fit_checks.user_errors("Trainer"):
            return self._evaluate(super().validate, given)

    def predict(self, *args: Any, **options: Any) -> Any:
        """Predict with the best checkpoint, or with ``monitor=None`` with the last one."""
        given = self._arguments(super().predict, args, options)
        with self._session(), fit_checks.user_errors("Trainer"):
            return self._evaluate(super().predict, given)

    def _read_limits(self) -> dict[str, Any]:
        """The limits of the loop, which a script may set between two calls of ``fit``."""
        return {"max_epochs": self.fit_loop.max_epochs, "max_steps": self.fit_loop.max_steps}

    def _take_new_limits(self) -> None:
        """Let a limit that was set in the loop or in a callback count like the argument."""
        now = self._read_limits()
        for name, value in now.items():
            if value != self._limits_of_loop[name]:
                self._options[name] = self._described[name] = value
        self._limits_of_loop = now
        limits = arguments.limits_of(self._own, self._options)
        self.spec = replace(self.spec, limits=limits)

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        """The user's own first, as in Lightning, and then the one of the run."""
        return sorted(super().checkpoint_callbacks, key=saves_run)

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Be one of the ranks of this run; see ``distributed_session``."""
        try:
            with distributed_session(self.spec.accelerator, self.spec.timeout_s):
                run_dirs.check_same(self.spec.run_dir)
                # Each node may have its own command; the command of rank zero counts.
                slices = self.spec.virtual_ranks, self.spec.shares
                number, shares = process_group.broadcast(slices)
                virtual.use(number, given_shares(shares))
                yield
        finally:
            virtual.leave()
            phases.switch(phases.OUTSIDE)
            # Lightning tears down no callback after an error, which a notebook survives.
            if not environment.under_torchrun():
                for watchdog in compat.callbacks_of(self, Watchdog):
                    watchdog.stop()

    def _check_before_run(
        self, model: L.LightningModule, loaders: Any, datamodule: L.LightningDataModule | None
    ) -> None:
        """Find what cannot be run, on every rank, before anything is written."""
        fit_checks.set_precision(model, self.precision)
        # Not by its truth: a DataModule may have a length, which is zero before it is set up.
        data = loaders if datamodule is None else datamodule
        if not self._has_config:
            self.spec = replace(self.spec, config=self._describe(model, data))
        fit_checks.set_up_data(self, datamodule)
        if self.spec.ends_with_test:
            self._test_follows = fit_checks.has_test(model, datamodule)
        if self._test_follows:
            fit_checks.check_limit_of_test(self, model, datamodule)
        plugin.call("before_run", self.spec, model, data)

    @contextmanager
    def _recorded(self, *, ends_run: bool) -> Iterator[None]:
        """Leave state, report and copies of the run when this block ends."""
        if self.spec.saves_nothing:
            with fit_checks.user_errors("Trainer"):
                yield
            return
        has_ended = True
        try:
            with (
                lifecycle.recorded(self.spec, lambda: progress_of(self), ends_run=ends_run),
                fit_checks.user_errors("Trainer"),
                lifecycle.full_disk_is_one_message(self.spec.run_dir),
            ):
                yield
            has_ended = ends_run
        except stopping.Interrupted:
            # Not in a hook of the callback: this one may come while they hear of the first.
            for checkpoints in compat.callbacks_of(self, Checkpoints):
                checkpoints.note_lost_steps(self)
            raise
        finally:
            if has_ended:
                self._flush_copies()

    def _flush_copies(self) -> None:
        """Complete the copies of the run, when all its files are written."""
        for copy in compat.callbacks_of(self, KeepsCopy):
            copy.flush()

    def _begin_logs(self, ckpt_path: str | None) -> None:
        """Open the files of this rank: its log, and those of the trackers."""
        log_to_files(self.spec.run_dir)
        if self.spec.make_loggers is not None:
            trackers = self.spec.make_loggers() if self.is_global_zero else []
            for known in plugin.loggers_of(trackers, self.spec.run_dir):
                known.take_places()
            # A module sees the first.
            self.loggers = [*(trackers or [NullLogger(str(self.spec.run_dir))]), self._history]
        if self.is_global_zero:
            for known in plugin.loggers_of(self.loggers, self.spec.run_dir):
                known.resume(ckpt_path)

    @contextmanager
    def _logging_once(self, stage: str) -> Iterator[None]:
        """Let an evaluation log at the step of the run, and not again in what has its results."""
        if self._has_trained or self.spec.saves_nothing:
            yield
            return
        loggers = self.loggers
        known = plugin.loggers_of(loggers, self.spec.run_dir)
        if on_rank_zero(lambda: any(each.is_repeated(stage) for each in known)):
            self.loggers = [NullLogger(str(self.spec.run_dir)), self._history]
        epoch_logs.set_logged_steps(self, record.read(self.spec.run_dir).step or 0)
        try:
            yield
        finally:
            self.loggers = loggers
            epoch_logs.set_logged_steps(self, 0)

    def _leave_alone(self) -> None:
        """Say that the run is finished, and let scripts read what they read after training."""
        self._was_finished = True
        self._read_finished_state()
        self._give_final_weights()
        if self.is_global_zero:
            self.results = read_final_metrics(self.spec.run_dir) or {}
            place, another = shorten(self.spec.run_dir), self.spec.another_run
            print(f"Nothing to do, the run in {place} is finished; for a new one use {another}.")
            print(self.spec.summarize(self.spec.run_dir), flush=True)

    def _give_final_weights(self) -> None:
        """Give the module what the finished run has left in it: a script goes on with it."""
        assert self._module is not None
        self._announce_lost_weights(self._module)
        path = lifecycle.last_checkpoint(self.spec)
        if path is None:
            why = "its checkpoints are gone"
        elif strategies.is_sharded(self.strategy):
            why = "they are sharded"
        else:
            content = StandIns(self._module).put_back(checkpoint.load(Path(path)))
            weights.make_room(self._module, content)
            misfit = weights.find_misfit(content["state_dict"], self._module)
            if misfit is None or not self._module.strict_loading:
                weights.load_into(self._module, content)
                self._left = self._module, sums_of_weights(self._module)
                return
            why = misfit
        if self.is_global_zero:
            print(f"Note: the module keeps its first weights and not those of the run, as {why}")

    def _read_finished_state(self) -> None:
        """Give savers, early stopping and metrics the state that the run has ended with."""
        found = on_rank_zero(read_final_state, self.spec.run_dir, self._stateful())
        if not found:
            return
        for checkpoints in compat.callbacks_of(self, Checkpoints):
            checkpoints.take_best(found)
        keep_scores(self, found["callbacks"])
        for key, callback in self._stateful().items():
            if key in found["callbacks"]:
                callback.load_state_dict(found["callbacks"][key])
        self.callback_metrics.update(found["checkpoints"]["metrics"])

    def _stateful(self) -> dict[str, L.Callback]:
        """The callbacks that scripts ask for results, by the keys of their states."""
        return {callback.state_key: callback for callback in find_deciders(self)}

    def _finish(self, metrics: Mapping[str, float]) -> None:
        """Write the final metrics, which ends the run."""
        if not self.is_global_zero:
            return
        if self.spec.saves_nothing:
            self.results |= self._tested()
            return
        self.results = dict(metrics)
        lifecycle.finish(self.spec, metrics)
        print(self.spec.summarize(self.spec.run_dir), flush=True)

    def _arguments(
        self, function: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The arguments of an evaluation by their names; without a model, the one of ``fit``."""
        given = inspect.signature(function).bind(*args, **options).arguments
        model = given.get("model")
        self._is_given = model is not None
        if model is None:
            given["model"] = self._module
            (checkpoints,) = compat.callbacks_of(self, Checkpoints)
            # As in Lightning: without a model the best weights, with one those that it has.
            if checkpoints.monitor is None and given.get("ckpt_path") is None:
                given["ckpt_path"] = "best"
        else:
            given["model"] = fit_checks.unwrap_compiled(model)
        # Lightning takes a DataModule in the place of the loaders, too.
        if isinstance(given.get("dataloaders"), L.LightningDataModule):
            given["datamodule"] = given.pop("dataloaders")
        return given

    def _evaluate(self, function: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Call a function of Lightning's Trainer with the checkpoint of this run."""
        fit_checks.set_precision(given["model"], self.precision)
        asked = given.get("ckpt_path")
        has_no_path = asked in (None, "best", "last")
        if has_no_path and not self.spec.saves_nothing:
            given["ckpt_path"] = self._find_checkpoint(asked, given["model"])
            self._history.read(record.read(self.spec.run_dir))
        stage = function.__name__
        with self._logging_once(stage), phases.spend(phases.VALIDATION):
            results = function(**given)
        if self.is_global_zero and not self.spec.saves_nothing:
            for known in plugin.loggers_of(self.loggers, self.spec.run_dir):
                known.note_evaluation(stage)
        self._left = given["model"], sums_of_weights(given["model"])
        return results

    def _announce_lost_weights(self, model: L.LightningModule) -> None:
        """Say that weights which a script has changed between two fits are not trained on."""
        module, sums = self._left
        if module is model and sums != sums_of_weights(model) and self.is_global_zero:
            print(
                "Note: the weights of the module were changed after the last fit or test; the run "
                "continues with those of its checkpoint"
            )

    def _find_checkpoint(self, asked: str | None, model: L.LightningModule) -> str | None:
        """The checkpoint to evaluate; None for the weights that a model has."""
        is_another_model = self._module is not None and model is not self._module
        if asked is None and is_another_model:
            # The script has made it from whatever weights, and wants to know about those.
            return None
        if asked == "last":
            return lifecycle.last_checkpoint(self.spec)
        if asked == "best":
            of_user = self._best_of_user()
            if of_user:
                return of_user
        path = lifecycle.best_checkpoint(self.spec)
        if path is None and self._test_follows and self.is_global_zero:
            print("Note: no epoch was the best one, so the last weights are tested")
        return path or lifecycle.last_checkpoint(self.spec)

    def _best_of_user(self) -> str:
        """The best checkpoint of the user's own ModelCheckpoint, if the run has no monitor."""
        if self._module is None:
            # This process has not called `fit`, which would have restored it.
            self._read_finished_state()
        (checkpoints,) = compat.callbacks_of(self, Checkpoints)
        saver = self.checkpoint_callback
        if not isinstance(saver, ModelCheckpoint):
            return ""
        if checkpoints.monitor is None:
            if not saver.best_model_path and self.is_global_zero:
                print("Note: ModelCheckpoint has saved no best checkpoint, so the last one is used")
            return saver.best_model_path
        is_same = (saver.monitor, saver.mode) == (checkpoints.monitor, checkpoints.mode)
        if saver.monitor is not None and not is_same and self.is_global_zero:
            print(
                f"Note: ckpt_path=best is best.ckpt, by {checkpoints.monitor}, and not the best of "
                f"ModelCheckpoint, by {saver.monitor}; for that pass its best_model_path"
            )
        return ""

    def _tested(self) -> dict[str, float]:
        """The metrics of the stage that has just ended."""
        return {name: value.item() for name, value in self.callback_metrics.items()}

    def _describe(self, model: L.LightningModule, data: Any) -> dict[str, Any]:
        """What ``config.yaml`` holds, and what is compared when the run continues."""
        described: dict[str, Any] = {"seed": self.spec.seed, "trainer": self._described}
        for name, part in ("model", model), ("data", data):
            described[name] = {"class": strategies.name_of(part)}
            if isinstance(getattr(part, "batch_size", None), int):  # of a DataLoader
                described[name]["batch_size"] = part.batch_size
            for key, value in hyperparameters_of(part).items():
                # LightningCLI adds a key of its own, which begins with an underscore.
                if not str(key).startswith("_"):
                    described[name][key] = value
        config: dict[str, Any] = redact_values(describe(self._config or described))
        return config


@contextmanager
def distributed_session(accelerator: str, timeout_s: float) -> Iterator[None]:
    """Meet the other ranks, if they have not met; an error within ends all of them.

    Within the block a signal stops the run; afterwards it ends the process at once.
    """
    if threading.current_thread() is threading.main_thread() and not stopping.is_installed():
        stopping.install()
    plugin.call("before_meeting", accelerator)
    meeting.find_rank_zero(timeout_s)
    process_group.init(accelerator, timeout_s)
    # init_process_group wraps sys.excepthook; put ours back on top, or the one-line error is lost.
    failure.ErrorHook.install()
    try:
        with process_group.shared_errors():
            yield
            # One that came while the results were written would be forgotten.
            stopping.check()
            # The script goes on alone.
            stopping.defer(False)
    finally:
        # Also after an error, which a notebook survives. A rank keeps its handlers: its agent
        # stops all ranks when the first fails, and this one may have to print why.
        if not environment.under_torchrun():
            stopping.uninstall()


def callbacks_of_run(
    spec: RunSpec,
    history: History,
    chosen: Sequence[L.Callback],
) -> list[L.Callback]:
    """The callbacks of every run, and those that were chosen, in the order in which they act.

    Args:
        spec: of the run.
        history: gets the metrics.
        chosen: what the user configures.
    """
    callbacks: list[L.Callback] = [history]
    # It writes a log.
    if not spec.saves_nothing:
        callbacks.append(Watchdog(spec.timeout_s, str(spec.run_dir)))
    callbacks += [SeedSteps(spec.seed), DataResume(spec.seed), RankState()]
    # Equal slices need no weights; one rank and one batch in a step have no others.
    is_cut = spec.accumulates or spec.split_batches or spec.virtual_ranks is not None
    if environment.world_size() > 1 or is_cut:
        callbacks.append(SliceWeighting(spec.shares, spec.split_batches, spec.seed))
    if spec.virtual_ranks is not None:
        callbacks.append(Machine())
    callbacks.append(HparamsOnResume())
    return [*callbacks, *plugin.make_callbacks(spec), *chosen, Objects(), RunState()]


def hyperparameters_of(part: Any) -> Mapping[Any, Any]:
    """What a model or a DataModule has saved of its arguments; empty for loaders."""
    saved: dict[Any, Any] = {}
    # Lightning removes what cannot be pickled from ``hparams``, when training begins.
    for name in ("hparams_initial", "hparams"):
        found = getattr(part, name, None)
        if isinstance(found, Namespace):
            found = vars(found)
        # An object that is no Lightning module may have any attribute of this name.
        if isinstance(found, Mapping):
            saved |= found
    return saved


def sums_of_weights(module: nn.Module) -> list[int]:
    """A number for each ordinary parameter, which differs if its values do."""
    sums = []
    for parameter in module.parameters():
        has_values = not isinstance(parameter, DTensor) and not is_lazy(parameter)
        if has_values and parameter.layout is torch.strided:
            # Not stacked, to read a device once: they may be on several.
            sums.append(int(sum_of_bits(parameter)))
    return sums


def saves_run(callback: L.Callback) -> bool:
    """Whether a callback is the one that saves the checkpoints of the run."""
    return isinstance(callback, Checkpoints)


def read_final_state(run_dir: Path, keys: Iterable[str]) -> dict[str, Any]:
    """What the last checkpoint of a run says about the best one, and the states of callbacks.

    Args:
        run_dir: of the run.
        keys: of the states that are wanted: others may be as large as the model.
    """
    content = read_without_tensors(run_dir / LAST)
    if not {"best_step", "checkpoints", "callbacks"} <= content.keys():
        return {}
    states = content["callbacks"]
    return {
        "best_step": content["best_step"],
        "checkpoints": content["checkpoints"],
        "callbacks": {key: states[key] for key in keys if key in states},
    }


def front_end_of_script(run_dir: Path, callbacks: Iterable[L.Callback]) -> RunSpec:
    """How a script, or LightningCLI, names a run and its options."""
    names: dict[str, str] = {}
    if arguments.savers_of_config(callbacks):
        names["allow_changes"] = "--trainer.allow_changes"
    return RunSpec(run_id=run_dir.name, run_dir=run_dir, option_names=names, summarize=say_finished)


def say_finished(run_dir: Path) -> str:
    """What a script prints at the end of its run."""
    return f"Finished: {shorten(run_dir)}"


def describe_options(
    options: Mapping[str, Any],
    monitor: str | None,
    mode: str | None,
    *,
    split_batches: bool,
    virtual_ranks: int | None,
) -> dict[str, Any]:
    """The arguments that make a run what it is.

    LightningCLI passes all arguments, so only those that differ from the defaults count.
    """
    described: dict[str, Any] = {"monitor": monitor, "mode": mode}
    if split_batches:
        described["split_batches"] = True
    if virtual_ranks is not None:
        described["virtual_ranks"] = virtual_ranks
    parameters = inspect.signature(L.Trainer).parameters
    for name, value in options.items():
        if name not in parameters or value != parameters[name].default:
            described[name] = value
    return described
