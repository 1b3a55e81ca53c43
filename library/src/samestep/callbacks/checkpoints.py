"""Save, link, repair: how a run keeps the checkpoints from which it continues.

- **Save.** ``last.ckpt`` is saved between two optimizer steps, and when an epoch is over;
  ``samestep.loops`` calls ``Checkpoints`` there. No other checkpoint is ever written. It is copied,
  and written while training continues. Before the next step for which all ranks have written what
  they save, the checkpoint is committed: it gets all its names, on all nodes.
- **Link.** If the saved weights are the best ones or those of an epoch to keep, the file gets a
  second name: ``best.ckpt``, ``epoch-0002.ckpt``. Nodes that do not see the directory get a copy of
  each.
- **Repair.** A process may be killed between two of these. The next one finds in ``last.ckpt``
  which links there should be, and makes those that are missing.
"""

import logging
import math
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, wraps
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    Checkpoint,
    EarlyStopping,
    ModelCheckpoint,
    Timer,
    early_stopping,
)
from torch import Tensor
from torch.nn.parameter import is_lazy

from samestep.callbacks.notes import join_names, print_note
from samestep.callbacks.slice_weighting import SliceWeighting
from samestep.callbacks.stand_ins import StandIns
from samestep.errors import ConfigError, RunError
from samestep.option_names import option, setting
from samestep.plugin import Plugin
from samestep.ranks import environment, stopping
from samestep.ranks.compat import callbacks_of
from samestep.ranks.process_group import on_rank_zero
from samestep.ranks.stopping import Stopped
from samestep.run import copies, manifest, record
from samestep.run.checkpoint import NEW_RUN, AtomicCheckpointIO, DryRun, plain_tensor, size_of
from samestep.run.files import link_file
from samestep.run.layout import shorten
from samestep.run.manifest import Manifest, verify
from samestep.run.record import Record
from samestep.run.save_interval import AUTO, SaveInterval, Seconds
from samestep.run.weights import explain_loading

log = logging.getLogger(__name__)

Settings = dict[str, Any]

SIGNS: dict[str | None, int] = {"max": 1, "min": -1}
"""By its mode, the factor with which a better value of a metric is a larger one."""


class Checkpoints(Checkpoint):
    """Saves ``last.ckpt``, from which the same command continues, and keeps the best weights.

    It saves at the end of each epoch, after a validation that was the best one, every ``every_s``
    seconds, and when told to stop by a signal; then all ranks stop together. ``samestep.loops``
    calls ``before_step`` before the first batch of each optimizer step, and ``end_epoch``.

    Each validation is compared with the best one so far, and each epoch's end too, because the
    metric may be one of training. If it has improved, ``last.ckpt`` is saved before the next step
    and gets the second name ``best.ckpt``, which so holds exactly the weights that were validated.
    Rank zero decides and links alone, so ranks with other values cannot wait for each other. A
    value that is not a number is no improvement.

    Rank zero also writes ``run.json`` when training begins and after each epoch.

    Args:
        dirpath: directory of the checkpoints, ``checkpoints`` in the run directory.
        every_s: seconds between two saves within an epoch, or ``auto``: as often as one percent
            of training time allows, every 2 to 300 s.
        monitor: a metric that the model logs, such as ``val/loss``. None: there is no
            ``best.ckpt``, and the last weights are tested.
        mode: ``min`` if less of the metric is better, ``max`` if more is; needed with ``monitor``.
        every_n_epochs: epochs between two checkpoints that are kept, such as ``epoch-0002.ckpt``;
            epochs are counted from 1. None keeps none.
    """

    def __init__(
        self,
        dirpath: str,
        every_s: Seconds = AUTO,
        monitor: str | None = None,
        mode: str | None = None,
        every_n_epochs: int | None = None,
    ) -> None:
        check_mode(monitor, mode)
        # Absolute, as the run directory is: the script may change the current one.
        self.folder = Path(environment.expand_home(dirpath, "dirpath")).absolute()
        self.run_dir = self.folder.parent
        self.last, self.best = self.folder / "last.ckpt", self.folder / "best.ckpt"
        self.interval = SaveInterval(every_s)
        """When the next save is due, and how long training has waited for saves."""
        self.monitor = monitor
        self.mode = mode
        self.every_n_epochs = every_n_epochs
        self.best_score: float | None = None
        self.best_step: int | None = None
        """Optimizer steps of the best checkpoint; None: nothing had a score yet."""
        self.best_epoch: int | None = None
        """Its epoch, counted from 1."""
        self._has_improved = False  # the weights of now are the best ones, and not yet kept
        self._has_validated = False  # in this process
        self._kept_epoch = 0  # the next save is its checkpoint, which is to be kept; 0: of none
        self._saved_batches = 0  # trained on, since the run began, when it was saved last
        self._checkpoint_io: AtomicCheckpointIO  # of the strategy
        self._stand_ins: StandIns | None = None
        self._has_told_lack = False
        self._due: list[Path] | None = None  # names of the checkpoint that is being written
        self._has_ended = False
        self._set_up_at = datetime.now(UTC)
        self._accumulated = 0  # batches of an optimizer step, by the configuration
        # Of the checkpoint from which the run continues:
        self._resumed_accumulated = 0  # batches of a step, if a callback had changed them
        self._resumed_metrics: dict[str, Tensor] = {}
        self._resumed_age = -1, ""

    # What scripts read of Lightning's ModelCheckpoint, with the same meaning.

    @property
    def best_model_path(self) -> str:
        """The checkpoint that is tested: ``best.ckpt``, or ``last.ckpt`` with ``monitor=None``.

        Empty before it exists.
        """
        if self.monitor is None:
            return self.last_model_path
        has_best = self.best_step is not None and self.best.exists()
        return str(self.best) if has_best else ""

    @property
    def best_model_score(self) -> Tensor | None:
        """The best value of the monitor; None before there is one."""
        if self.best_score is None:
            return None
        score = torch.tensor(self.best_score)
        # A metric may have 64 bits.
        return score if score.item() == self.best_score else score.double().fill_(self.best_score)

    @property
    def best_k_models(self) -> dict[str, Tensor]:
        """The best checkpoint and its value; there is one at most."""
        path, score = self.best_model_path, self.best_model_score
        return {path: score} if path and score is not None else {}

    @property
    def last_model_path(self) -> str:
        """``last.ckpt``, empty before it exists."""
        return str(self.last) if self.last.exists() else ""

    @property
    def dirpath(self) -> str:
        """The directory of the checkpoints."""
        return str(self.folder)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Tell the reader of checkpoints what to expect, and give the user's savers a folder."""
        note_early_stops()
        self._set_up_at, self._resumed_age = datetime.now(UTC), (-1, "")
        for saver in callbacks_of(trainer, ModelCheckpoint):
            # The module may have brought it.
            place_model_checkpoint(saver, self.run_dir)
            self._adapt(saver)
        # Lightning accepts no other one beside that of the run.
        self._checkpoint_io = trainer.strategy.checkpoint_io  # type: ignore[assignment]
        self._checkpoint_io.folder = self.folder
        self._checkpoint_io.resumes = stage == "fit"
        self._stand_ins = StandIns(pl_module)
        self._checkpoint_io.stand_ins = self._stand_ins
        explain_loading(trainer, f"Use the configuration that it was trained with, or {NEW_RUN}")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find what could not be saved, and end at once if early stopping had ended this run."""
        self._saved_batches = count_batches(trainer)
        if self._has_ended:
            trainer.should_stop = True
        if trainer.ckpt_path is None:
            self._try_to_save(trainer)
        else:
            self.interval.expected_s = record.read(self.run_dir).save_price_s
        self.interval.start()
        # GradientAccumulationScheduler sets it only where an epoch begins, and Lightning calls
        # `on_train_epoch_start` of no callback when it continues one.
        self._accumulated = trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches = self._resumed_accumulated or self._accumulated
        # Not every epoch logs each metric anew, but early stopping or a plateau schedule may ask
        # for it at the end of each.
        trainer.callback_metrics.update(self._resumed_metrics)
        # The process before may have been killed after it had recorded more than it had saved.
        self._record(trainer, trainer.current_epoch)

    def before_step(self, trainer: L.Trainer) -> None:
        """Continue, save, or save and stop, as all ranks agree; each calls this before a step.

        Raises:
            Stopped: on every rank, if one of them got a signal.
        """
        # Not by the step: Lightning counts only those of the optimizers that it wraps.
        has_new_batch = count_batches(trainer) > self._saved_batches
        # Rank zero alone says when a save is due: clocks and metrics of the ranks differ. A signal
        # may have come to any of them.
        agreed = stopping.agreed(
            save=has_new_batch and self._is_due() and trainer.is_global_zero,
            busy=self._checkpoint_io.is_writing(),
        )
        must_save = agreed.save or agreed.asked or agreed.signum > 0
        if must_save and has_new_batch:
            self._save(trainer)
        elif not agreed.busy:
            self._commit(trainer)
        signum = self._signal_to_stop(trainer, agreed)
        if signum:
            self._commit(trainer)
            raise Stopped(signum)
        if agreed.asked:
            self._commit(trainer)
            print_note(trainer, f"Saved after {describe_place(trainer)}, as was asked.")

    def _is_due(self) -> bool:
        """Whether this rank would save: for its best weights, or because time has passed."""
        return self._has_improved or self.interval.is_due(is_writing=self._due is not None)

    def _signal_to_stop(self, trainer: L.Trainer, agreed: stopping.Agreement) -> int:
        """The signal with which all ranks stop now; 0 for none. Every rank calls this."""
        # A signal that stops the run anyway gives the exit code; the job is queued all the same.
        is_requeued = agreed.requeue and self._requeue(trainer)
        if is_requeued and not agreed.signum:
            return signal.SIGUSR1
        return agreed.signum

    def _requeue(self, trainer: L.Trainer) -> bool:
        """Queue the job of Slurm again; whether the run must stop. Every rank calls this."""
        # Slurm ends the job as soon as it is queued again.
        self._commit(trainer)
        return on_rank_zero(stopping.requeue)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compare the weights that were validated with the best ones."""
        if not trainer.sanity_checking:
            self._has_validated = True
            self._compare(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compare with the best weights; ``end_epoch`` saves when Lightning is through."""
        self._compare(trainer)
        if self._has_validated and self.monitor not in (None, *trainer.callback_metrics):
            names = ", ".join(sorted(trainer.callback_metrics)) or "no metric at all"
            raise ConfigError(f"{setting('monitor', self.monitor)}: the run logs {names}")
        epoch = trainer.current_epoch + 1
        if self.every_n_epochs and epoch % self.every_n_epochs == 0:
            self._kept_epoch = epoch

    def end_epoch(self, trainer: L.Trainer) -> None:
        """Save an epoch that is over, and stop if any rank got a signal; every rank calls this.

        Raises:
            Stopped: on every rank, if one of them got a signal.
        """
        self._save(trainer)
        self._record(trainer, trainer.current_epoch)
        stopping.check()

    def end_run(self, trainer: L.Trainer) -> None:
        """Complete the last checkpoint, which callbacks and the test read; on all ranks."""
        self._commit(trainer)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Commit the checkpoint with which all ranks have agreed to stop."""
        if not isinstance(exception, Stopped):
            # It may be on one rank only, and committing needs all of them.
            self._keep_written(trainer)
            return
        self._commit(trainer)
        outcome = "saved" if self.last_model_path else "nothing was saved"
        place = describe_place(trainer)
        print_note(trainer, f"Stopped by {exception.name} after {place}; {outcome}.")

    def note_lost_steps(self, trainer: L.Trainer) -> None:
        """Say what a second Ctrl-C costs."""
        # From the file: the signal may have come in the middle of a save.
        last = manifest.read(self.last)
        lost, since = trainer.global_step, "as none was saved"
        if last is not None:
            lost -= last.global_step
            since = f"since the checkpoint of step {last.global_step}"
        # It may also have come when the first one had saved.
        end = "Ended without saving" if lost else "Ended at once"
        print_note(trainer, f"{end}. Lost steps: {lost}, {since}.")

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Let the checkpoint say which one is the best, and keep what Lightning forgets."""
        metrics = trainer.callback_metrics
        savers = callbacks_of(trainer, ModelCheckpoint)
        is_changed = trainer.accumulate_grad_batches != self._accumulated
        checkpoint["best_step"] = self.best_step
        checkpoint["checkpoints"] = {
            "monitor": self.monitor,
            "best_score": self.best_score,
            "best_epoch": self.best_epoch,
            "kept_epoch": self._kept_epoch,
            # A run that is out of time continues with a larger max_time.
            "has_ended": trainer.should_stop and has_time_left(trainer),
            "ended_by": triggered_early_stopping(trainer),
            "accumulate_grad_batches": trainer.accumulate_grad_batches if is_changed else 0,
            "metrics": {name: plain_tensor(metrics[name]).cpu().clone() for name in metrics},
            "savers": {saver.state_key: read_saver(saver) for saver in savers},
        }
        # Lightning calls the module last, and savers as the last callbacks.
        if self._stand_ins is not None:  # an error before ``setup`` may make another callback save
            self._stand_ins.keys_of_others = {*checkpoint}

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember all of it, and repair the links, if this is a run that continues."""
        # Lightning gives each callback its state after this; a file of weights has none.
        keep_scores(trainer, checkpoint.get("callbacks", {}))
        if trainer.state.fn != "fit":
            # A callback that averages weights has just put those of training into the model.
            trainer.strategy.load_model_state_dict(checkpoint, strict=pl_module.strict_loading)
            return
        self.take_best(checkpoint)
        state = checkpoint["checkpoints"]
        self._has_ended = state["has_ended"] and not has_other_settings(trainer, state["ended_by"])
        self._resumed_accumulated = state["accumulate_grad_batches"]
        self._resumed_metrics = state["metrics"]
        for saver in callbacks_of(trainer, ModelCheckpoint):
            set_saver(saver, state["savers"].get(saver.state_key, {}))
        own = manifest.read(Path(str(trainer.ckpt_path)))
        if own is not None:
            self._resumed_age = own.age
        if trainer.is_global_zero:
            self._repair(Path(str(trainer.ckpt_path)), state["kept_epoch"])

    def _adapt(self, saver: ModelCheckpoint) -> None:
        """Let a saver of the user save what it would in a run that is not interrupted.

        It saves nothing more where the run stops to continue. And it writes again what a killed
        process wrote after its last save, as those steps are taken again: Lightning would take the
        file for one of another run, and name the new one ``epoch=1-v1.ckpt``, so the best
        checkpoint would have another name.
        """
        if "file_exists" in vars(saver):
            return
        exists, save_after_error = saver.file_exists, saver.on_exception

        def exists_and_counts(filepath: Any, trainer: L.Trainer) -> bool:
            return exists(filepath, trainer) and not on_rank_zero(self._is_lost, Path(filepath))

        def save_unless_stopped(
            trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
        ) -> None:
            if not isinstance(exception, Stopped):
                save_after_error(trainer, pl_module, exception)

        saver.file_exists = exists_and_counts  # type: ignore[method-assign]
        saver.on_exception = save_unless_stopped  # type: ignore[method-assign]

    def _is_lost(self, path: Path) -> bool:
        """Whether an earlier process of this run saved a file at a step that is not yet taken."""
        own, known = manifest.read(path), record.read(self.run_dir)
        if own is None or own.run_id != known.run_id or not known.starts:
            return False
        try:
            began = datetime.fromisoformat(known.starts[0]["started"])
            saved = datetime.fromisoformat(own.saved)
        except (KeyError, TypeError, ValueError):
            return False
        # An older file is of a run of this name whose directory was removed.
        return own.age > self._resumed_age and began <= saved < self._set_up_at

    def take_best(self, checkpoint: Mapping[str, Any]) -> None:
        """Take from a checkpoint of the run which one is the best, if it has the same monitor."""
        state = checkpoint["checkpoints"]
        if state["monitor"] == self.monitor:
            self.best_score, self.best_epoch = state["best_score"], state["best_epoch"]
            self.best_step = checkpoint["best_step"]

    def _try_to_save(self, trainer: L.Trainer) -> None:
        """Make a checkpoint before the first step, to find now what could not be saved or read."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        module = trainer.lightning_module
        if any(map(is_lazy, chain(module.parameters(), module.buffers()))):
            # Lazy layers have no weights before the first batch.
            return
        found = self._run_dry(trainer)
        if not found.was_reached:
            raise ConfigError(
                f"{option('strategy')}: {type(trainer.strategy).__name__} writes checkpoints of "
                "its own kind, which cannot be verified; a run needs one file with all weights"
            )
        if found.problem:
            raise ConfigError(found.problem)
        for note in notes_on(found):
            print_note(trainer, note)

    def _run_dry(self, trainer: L.Trainer) -> DryRun:
        """What a checkpoint would be that is not written; every rank must call this."""
        dry_run = self._checkpoint_io.dry_run = DryRun()
        started = time.monotonic()
        # Should the strategy write files itself, this name is not taken for a checkpoint.
        trainer.save_checkpoint(self.folder / ".trial.ckpt")
        self.interval.expect(time.monotonic() - started, size_of(dry_run.content))
        if dry_run.content:
            for plugin in callbacks_of(trainer, Plugin):
                dry_run.problem = dry_run.problem or plugin.find_problem(trainer, dry_run.content)
        dry_run.content = {}
        # Rank zero writes, and every rank must know what it has found.
        found: DryRun = trainer.strategy.broadcast(dry_run)
        self._checkpoint_io.dry_run = None
        return found

    def _compare(self, trainer: L.Trainer) -> None:
        """Note whether the weights of now have a better value than the best ones."""
        value = float(trainer.callback_metrics.get(self.monitor or "", math.nan))
        if math.isnan(value):
            return
        sign = SIGNS[self.mode]
        if self.best_score is not None and sign * value <= sign * self.best_score:
            return
        self._has_improved = True
        self.best_score, self.best_step = value, trainer.global_step
        self.best_epoch = trainer.current_epoch + 1

    def _save(self, trainer: L.Trainer) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        # The checkpoint before must be in its place: only one can be in writing.
        self._commit(trainer)
        with self.interval.saving():
            self._write(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        """Save the run; what a thread still writes is left to ``_commit``."""
        self._checkpoint_io.in_background = self._checkpoint_io.saves_for_run = True
        began = time.monotonic()
        try:
            trainer.save_checkpoint(self.last)
        finally:
            self._checkpoint_io.in_background = self._checkpoint_io.saves_for_run = False
        pending = self._checkpoint_io.pending
        for plugin in callbacks_of(trainer, Plugin):
            plugin.on_saved(trainer, began, pending.written if pending else None)
        self._saved_batches = count_batches(trainer)
        self._due = [self.last]
        if self._has_improved:
            self._has_improved = False
            self._due.append(self.best)
        if self._kept_epoch:
            self._due.append(self._path_of(self._kept_epoch))
            self._kept_epoch = 0

    def _commit(self, trainer: L.Trainer) -> None:
        """Let the checkpoint that was saved last appear, with all names that it should have."""
        if self._due is None:
            return
        paths, self._due = self._due, None
        with self.interval.training_waits():
            cpu_s = self._checkpoint_io.commit()
            if trainer.is_global_zero:
                self._link(paths)
                manifest.prune(self.folder)
            copies.replicate(self.run_dir, [f"checkpoints/{path.name}" for path in paths])
            # All ranks wait: the test after the last epoch looks for its checkpoint on each.
            trainer.strategy.barrier()
        self.interval.complete(cpu_s)
        self._announce(trainer)

    def _link(self, paths: list[Path]) -> None:
        """Give the checkpoint that was saved last its other names."""
        for path in paths[1:]:
            link_file(self.last, path)

    def _keep_written(self, trainer: L.Trainer) -> None:
        """After an error, let a checkpoint in one file have its names; its rank needs no other."""
        if self._due is None or not trainer.is_global_zero:
            return
        paths, self._due = self._due, None
        pending = self._checkpoint_io.pending
        if pending is None or pending.finish:
            return
        # The error that ends the run counts, not one of this.
        if pending.written.exception() is None:
            with suppress(RunError):
                self._link(paths)

    def _announce(self, trainer: L.Trainer) -> None:
        """Say how often the run saves, and that training waits for the disk if memory is short."""
        announcement = self.interval.find_announcement()
        if announcement:
            print_note(trainer, announcement)
            if trainer.is_global_zero:
                record.try_to_update(self.run_dir, record.RUNNING, **self.interval.facts())
        lack = self._checkpoint_io.lack
        if lack is not None and not self._has_told_lack:
            self._has_told_lack = True
            print_note(trainer, f"Note: training waits while checkpoints are written: {lack}")

    def _repair(self, source: Path, kept_epoch: int) -> None:
        """Make the links that are missing, when a run continues from ``source``.

        The process before may have been killed after it had saved last.ckpt, and before it linked.
        """
        if kept_epoch and not self._path_of(kept_epoch).exists():
            link_file(source, self._path_of(kept_epoch))
        if self.best_step is None:
            return
        known = record.read(self.run_dir)
        intact = self._find_best(known)
        if intact is not None:
            if intact != self.best:
                link_file(intact, self.best)
            return
        found = verify(self.best, known)
        why = found if isinstance(found, str) else f"it is from step {found.global_step}"
        log.warning(
            "%s is not the best checkpoint, of step %s: %s. The best one from now on "
            "replaces it.", self.best, self.best_step, why,
        )  # fmt: skip
        self.best_score = self.best_step = self.best_epoch = None

    def _find_best(self, known: Record) -> Path | None:
        """An intact checkpoint of the best step; None if there is none."""
        # If best.ckpt was removed, its weights may still have another name.
        for path in (self.best, *manifest.find_checkpoints(self.folder)):
            own = manifest.read(path)
            if own is None or not own.is_of_run:
                continue
            is_of_best_step = own.global_step == self.best_step
            # Only then: it hashes the whole file.
            if is_of_best_step and isinstance(verify(path, known), Manifest):
                return path
        return None

    def _record(self, trainer: L.Trainer, num_epochs: int) -> None:
        """Write how far the run is; ``samestep.run.lifecycle`` writes how it ends."""
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            facts = progress_of(trainer) | {"epoch": num_epochs}
            record.try_to_update(self.run_dir, record.RUNNING, **facts)

    def _path_of(self, epoch: int) -> Path:
        return self.folder / f"epoch-{epoch:04}.ckpt"


def check_mode(monitor: str | None, mode: str | None) -> None:
    """Raise a ConfigError if nothing says which value of the monitored metric is the best."""
    if monitor is not None and mode not in ("min", "max"):
        raise ConfigError(
            f"{setting('monitor', monitor)}: {setting('mode', mode)} must be min or max: choose "
            f"{setting('mode', 'max')} if a higher {monitor} is better, {setting('mode', 'min')} "
            "if a lower one is"
        )


def notes_on(dry_run: DryRun) -> Iterator[str]:
    """What checkpoints do not hold as it is."""
    if dry_run.made_plain:
        yield (
            "Note: checkpoints keep these values as plain tensors, without what their class adds: "
            f"{', '.join(dry_run.made_plain)}"
        )
    if dry_run.stand_ins:
        yield (
            "Note: checkpoints hold the values of these objects, and the run continues with the "
            f"objects that the program makes: {join_names(dry_run.stand_ins)}"
        )
    if dry_run.left_out:
        ignored = ", ".join(repr(name.split()[0]) for name in dry_run.left_out)
        yield (
            "Note: checkpoints leave out these hyperparameters, which could not be read again: "
            f"{', '.join(dry_run.left_out)}. load_from_checkpoint needs them as arguments. To "
            f"leave them out yourself: self.save_hyperparameters(ignore=[{ignored}])"
        )


def place_model_checkpoint(saver: ModelCheckpoint, run_dir: Path) -> None:
    """Give a ModelCheckpoint of the user a folder, which is not that of the run."""
    place = run_dir / "model_checkpoints"
    folder = Path(saver.dirpath or place)
    # Resolved: Lightning has followed the links in a dirpath.
    if folder.resolve() == (run_dir / "checkpoints").resolve():
        # Where many templates save, beside what is the run's own here.
        folder = place
        if environment.rank() == 0:
            print(
                f"Note: ModelCheckpoint saves to {shorten(folder)}, because the checkpoints of "
                "the run are in checkpoints",
                flush=True,
            )
    saver.dirpath = str(folder)


def keep_scores(trainer: L.Trainer, states: dict[str, Any]) -> None:
    """Let each ModelCheckpoint keep its scores where its folder has another name than before.

    The folder of a template may have the time in its name. Lightning would forget the scores then,
    and take the next checkpoint for the best, however bad it is.

    Args:
        trainer: of the savers.
        states: of callbacks by their keys, from a checkpoint; those of savers are replaced.
    """
    for saver in callbacks_of(trainer, ModelCheckpoint):
        if saver.state_key in states:
            states[saver.state_key] = {**states[saver.state_key], "dirpath": saver.dirpath}


def progress_of(trainer: L.Trainer) -> dict[str, Any]:
    """The step, the best value so far (None where there is none yet), saves, unequal shares."""
    facts: dict[str, Any] = {"step": trainer.global_step}
    for own in callbacks_of(trainer, Checkpoints):
        facts |= {"monitor": own.monitor, "mode": own.mode}
        facts |= {"best": own.best_score, "best_epoch": own.best_epoch}
        facts |= own.interval.facts()
    for weighting in callbacks_of(trainer, SliceWeighting):
        if weighting.shares:
            facts["shares"] = list(weighting.shares)
    return facts


def count_batches(trainer: L.Trainer) -> int:
    """The batches that the run has trained on, over all epochs and starts."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def describe_place(trainer: L.Trainer) -> str:
    """How far the training is: the step, or the batch where Lightning counts no step."""
    step = trainer.global_step
    return f"step {step}" if step else f"batch {count_batches(trainer)}"


def or_infinite(limit: int | float | None) -> float:
    """A limit of the Trainer; None and -1 are no limit."""
    if limit in (None, -1):
        return math.inf
    return limit


def has_time_left(trainer: L.Trainer) -> bool:
    """Whether no ``max_time`` of a Timer is over."""
    for timer in callbacks_of(trainer, Timer):
        seconds = timer.time_remaining()
        if seconds is not None and seconds <= 0:
            return False
    return True


def triggered_early_stopping(trainer: L.Trainer) -> dict[str, Settings]:
    """The settings of each EarlyStopping that has ended the run, by the key of its state."""
    triggered = {}
    for callback in callbacks_of(trainer, EarlyStopping):
        if has_ended_run(callback):
            triggered[callback.state_key] = settings_of(callback)
    return triggered


def has_other_settings(trainer: L.Trainer, ended_by: dict[str, Settings]) -> bool:
    """Whether an EarlyStopping that has ended the run would not end it with its settings of now."""
    stoppers = callbacks_of(trainer, EarlyStopping)
    now = {stopper.state_key: settings_of(stopper) for stopper in stoppers}
    return not ended_by.items() <= now.items()


def settings_of(stopping: EarlyStopping) -> Settings:
    """What decides when it ends the run; the metric is part of its state's key."""
    names = ("patience", "min_delta", "check_finite", "stopping_threshold", "divergence_threshold")
    return {name: getattr(stopping, name) for name in names}


SAVER_STATE = "_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation"
"""What decides in Lightning 2.6 whether a ModelCheckpoint saves, and is not in its state."""


def read_saver(saver: Any) -> dict[str, Any]:
    """What a ModelCheckpoint forgets in a checkpoint: whether it has saved, and at which step.

    A run that continues would save its last weights again, where an undisturbed one does not.
    """
    return {name: getattr(saver, name) for name in SAVER_STATE if hasattr(saver, name)}


def set_saver(saver: Any, state: Mapping[str, Any]) -> None:
    """Give a ModelCheckpoint what ``read_saver`` has read."""
    for name, value in state.items():
        setattr(saver, name, value)


ENDS_RUN = "_samestep_ends_run"
"""An attribute of an EarlyStopping of Lightning 2.5, once it has ended the run."""


def has_ended_run(stopping: EarlyStopping) -> bool:
    """Whether an EarlyStopping has ended the run; Lightning 2.6 says so by a reason."""
    reason = getattr(stopping, "stopping_reason", None)
    return getattr(stopping, ENDS_RUN, False) if reason is None else bool(reason.value)


@cache  # once in a process, which may have several runs
def note_early_stops() -> None:
    """Let an EarlyStopping of Lightning 2.5 say that it has ended the run, as that of 2.6 does.

    It keeps the number of the epoch only, which is 0 in the first epoch and without a stop.
    """
    if hasattr(early_stopping, "EarlyStoppingReason"):
        return
    kind: Any = EarlyStopping
    evaluate = kind._evaluate_stopping_criteria

    @wraps(evaluate)
    def evaluate_and_note(stopping: Any, current: Tensor) -> tuple[bool, Any]:
        ends_run, reason = evaluate(stopping, current)
        if ends_run:
            setattr(stopping, ENDS_RUN, True)
        return ends_run, reason

    kind._evaluate_stopping_criteria = evaluate_and_note
