"""The loop around Optuna's study: start trials, report their metrics, end the bad ones."""

import asyncio
import math
import shlex
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import optuna
from optuna.trial import Trial, TrialState

from samestep.errors import RunError
from samestep.grid import slots
from samestep.grid.job_process import MAX_STARTS, is_killed, is_running, last_error, start_job
from samestep.hydra import project
from samestep.ranks import process
from samestep.run import lock, record
from samestep.run.metrics import read_history
from samestep.sweep.settings import Settings, num_devices
from samestep.sweep.study import ENDED, Study, make_sampler_and_pruner

POLL_S = 0.5  # between two looks at a trial
COPY_S = 5.0  # between two looks at the copy of a run in a store, which cost requests


class Search:
    """The trials of a study.

    Args:
        settings: what is searched.
        script: the program of a trial, in tests a stand-in; by default the project's ``train.py``.

    Raises:
        ConfigError: if Optuna or an earlier search of this name contradicts the settings.
    """

    def __init__(self, settings: Settings, script: Path | None = None) -> None:
        self.settings = settings
        self.signum = 0
        sampler, pruner = make_sampler_and_pruner(settings)
        self.gpus = share_gpus(settings)
        # Held until this process ends: two searches would start the same trials.
        lock.acquire(settings.folder)
        self.logs = settings.folder / "logs"
        self.logs.mkdir(exist_ok=True)
        self.study = Study(settings, sampler, pruner)
        self.program = [str(script or project.project_folder() / "train.py")]
        if not settings.is_local:
            self.program = ["-m", "samestep.sweep.cluster_job"]

    def run(self) -> int:
        """Search, and print the best trial and the next command.

        Returns:
            0, 1 if no trial was completed, or 128 and the number of a signal.
        """
        try:
            asyncio.run(self.search())
        except asyncio.CancelledError:
            return 128 + self.signum
        counts = [f"{len(self.study.trials(state))} {word}" for state, word in ENDED.items()]
        print(f"{', '.join(counts)}; what they have printed is in {self.logs}")
        if not self.study.trials(TrialState.COMPLETE):
            return 1
        self._print_best()
        return 0

    async def search(self) -> None:
        """Continue the trials that a killed search has left, and start the others."""
        self._stop_at_signals()
        ended, total = self.study.num_ended(), self.settings.keys.n_trials
        print(f"Search: {self.study.journal}: {ended} of {total} trials have ended", flush=True)
        unfinished = self.study.resume_trials()
        # Trials of a killed search may still train, on any of the GPUs.
        while any(map(is_running, self.logs.iterdir())):
            await asyncio.sleep(POLL_S)
        workers = [self.work(unfinished, gpus) for gpus in self.gpus]
        await asyncio.gather(*workers)

    async def work(self, unfinished: list[Trial], gpus: str | None) -> None:
        """Train one trial after the other, on these GPUs."""
        # All workers take from the same list and the same study. They need no lock, because only
        # an await lets another one run.
        while unfinished or not self.study.is_full():
            trial = unfinished.pop(0) if unfinished else self.study.propose()
            best, reason = None, ""
            try:
                best = await self.train(trial, gpus)
                state = TrialState.COMPLETE
            except optuna.TrialPruned as error:
                state, reason = TrialState.PRUNED, str(error)
                self._note_pruned(f"{self.settings.name}-{trial.number}", reason)
            except RunError as error:
                state, reason = TrialState.FAIL, str(error)
            line = self.study.end_trial(trial, state, best, reason)
            print(f"[{self.study.num_ended()}/{self.settings.keys.n_trials}] {line}", flush=True)

    async def train(self, trial: Trial, gpus: str | None) -> float:
        """Train a trial to its end, and return its best value.

        Raises:
            TrialPruned: if it is worse than others, says the pruner.
            RunError: if it fails.
        """
        settings = self.settings
        run_id = f"{settings.name}-{trial.number}"
        program = [*self.program, *settings.overrides, *settings.choose(trial.params)]
        variables = {"RUN_ID": run_id, project.VARIABLE: str(project.project_folder())}
        if gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = gpus
        log = self.logs / f"{run_id}.log"
        for _ in range(MAX_STARTS):
            # After a kill, a rank may outlive the process that has started it.
            while is_running(log):
                await asyncio.sleep(POLL_S)
            process = start_job(program, variables, log)
            exit_code, values = await self.report_until_end(process, trial, run_id)
            if not is_killed(exit_code):
                break
        if exit_code:
            raise RunError(f"exit code {exit_code}: {last_error(log)}")
        if not values:
            raise RunError(f"it has logged no {settings.monitor}")
        return max(values) if settings.is_max else min(values)

    async def report_until_end(
        self, process: subprocess.Popen[bytes], trial: Trial, run_id: str
    ) -> tuple[int, list[float]]:
        """Report the metrics of a process until it ends; return its exit code and all values."""
        pause = COPY_S if self.settings.copies else POLL_S
        try:
            exit_code = None
            while exit_code is None:
                await asyncio.sleep(pause)
                # Asked before the metrics are read, so that the values after the end are complete.
                exit_code = process.poll()
                values = self._read_values(run_id)
                self.study.report(trial, values, is_over=exit_code is not None)
            return exit_code, values
        finally:
            # If the trial is pruned or the search stopped, the run saves before it ends, and only
            # then may its GPUs be used again. After its end, this does nothing.
            process.terminate()
            while process.poll() is None:
                await asyncio.sleep(POLL_S)

    def _note_pruned(self, run_id: str, reason: str) -> None:
        """Say in the record of the run why it was stopped; it knows of a signal only."""
        run_dir = Path(self.settings.cfg.run_root, run_id)
        # The runs of a launched search lie elsewhere.
        if (run_dir / record.FILE).exists():
            record.try_to_update(run_dir, record.STOPPED, f"{record.PRUNED} {reason}")

    def _read_values(self, run_id: str) -> list[float]:
        """The monitored metric of a run after each validation.

        Raises:
            RunError: if one of the values is not finite.
        """
        run_dir = Path(self.settings.cfg.run_root, run_id)
        if self.settings.copies:
            run_dir = self._fetch_metrics(f"{self.settings.copies}/{run_id}", run_id)
        monitor = self.settings.monitor
        values = [row[monitor] for row in read_history(run_dir) if monitor in row]
        if not all(map(math.isfinite, values)):
            raise RunError(f"{monitor} is nan or infinite")
        return values

    def _fetch_metrics(self, url: str, run_id: str) -> Path:
        """Copy the newest metrics of a run from a store, and return the folder of the copy."""
        folder = self.settings.folder / "copies" / run_id
        # Any error: the run may not have saved yet, or the store is away. The next look asks again,
        # and until then the older copy is read.
        with suppress(Exception):
            fs, root = fsspec.url_to_fs(url)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "metrics.csv").write_bytes(fs.cat_file(f"{root}/metrics.csv"))
        return folder

    def _stop_at_signals(self) -> None:
        """Have a signal cancel this task, which stops the trials and waits for them."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task

        def stop(signum: int) -> None:
            # A second signal must not interrupt the wait for the trials, which are saving.
            if not self.signum:
                self.signum = signum
                print(f"{signal.Signals(signum).name}: the trials save and end ...", flush=True)
                task.cancel()

        for signum in process.signals_to_handle():
            loop.add_signal_handler(signum, stop, signum)

    def _print_best(self) -> None:
        best = self.study.optuna.best_trial
        print(f"The best\n  {self.study.describe(best)}")
        print(f"Inspect\n  optuna-dashboard {self.study.journal}")
        program = "python train.py" if self.settings.is_local else "samestep launch"
        arguments = shlex.join([*self.settings.overrides, *self.settings.choose(best.params)])
        print(f"Next\n  {program} {arguments}", flush=True)


def share_gpus(settings: Settings) -> list[str | None]:
    """The GPUs of each trial that runs at the same time, such as ``["0,1", "2,3"]``.

    It is None for a trial on the CPU or on a cluster.
    """
    at_once, trainer = settings.keys.trials_at_once, settings.cfg.trainer
    if not settings.is_local or trainer.accelerator == "cpu":
        return [None] * at_once
    return slots.share_gpus("trials_at_once", at_once, num_devices(settings.cfg))
