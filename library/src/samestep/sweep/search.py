"""The loop around Optuna's study: start trials, report their metrics, end the bad ones."""

import asyncio
import math
import os
import re
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import optuna
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from optuna.samplers import BruteForceSampler, GridSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from samestep.errors import ConfigError, RunError
from samestep.hydra import project
from samestep.hydra.compose import message_of
from samestep.ranks import environment, failure
from samestep.run import lock
from samestep.run.metrics import read_history
from samestep.sweep import forks
from samestep.sweep.settings import Settings

POLL_S, COPY_S = 0.5, 5.0  # between two looks at a trial; at the copy of its run in a store
MAX_STARTS = 3  # of a trial that is killed from outside
KILLED = (failure.EXIT_SIGTERM, 128 + signal.SIGKILL, 255)  # 255: the server of forks was killed
ENDED = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}


class Search:
    """The trials of a study.

    Args:
        settings: what is searched.
        script: the program of a trial, of tests a stand-in; by default the project's ``train.py``.

    Raises:
        ConfigError: if Optuna or an earlier search of this name contradicts the settings.
    """

    def __init__(self, settings: Settings, script: Path | None = None) -> None:
        self.settings = settings
        self.signum = 0
        nodes = (settings.keys.sampler, settings.keys.pruner)
        try:
            sampler, pruner = (instantiate(node, _convert_="all") for node in nodes)
        except InstantiationException as error:
            raise ConfigError(f"sampler or pruner: {message_of(error)}") from None
        if isinstance(sampler, GridSampler | BruteForceSampler):
            raise ConfigError(
                f"sampler._target_=optuna.samplers.{type(sampler).__name__}: tries every value, "
                "whatever n_trials says; train a grid: python train.py -m KEY=VALUE,VALUE"
            )
        self.gpus = share_gpus(settings)
        lock.acquire(settings.folder)  # until this process ends
        self.logs = settings.folder / "logs"
        self.logs.mkdir(exist_ok=True)
        self.journal = settings.folder / "journal.log"
        # A search that was killed may have left a lock, and a full disk a part of a last line.
        Path(f"{self.journal}.lock").unlink(missing_ok=True)
        if self.journal.exists():
            os.truncate(self.journal, self.journal.read_bytes().rfind(b"\n") + 1)
        self.storage = JournalStorage(JournalFileBackend(str(self.journal)))
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(
            storage=self.storage, sampler=sampler, pruner=pruner, study_name=settings.name,
            direction="maximize" if settings.is_max else "minimize", load_if_exists=True,
        )  # fmt: skip
        facts = [*map(str, settings.space.items()), *settings.overrides, settings.monitor]
        before = self.study.user_attrs.get("search", facts)
        if before != facts:
            raise ConfigError(
                f"{settings.folder} holds a search with {sorted({*before} - {*facts})} instead "
                f"of {sorted({*facts} - {*before})}; use the old values, or another RUN_ID"
            )
        self.study.set_user_attr("search", facts)
        train = [str(script or project.project_folder() / "train.py")]
        is_local = settings.cfg.cluster.name == "local"
        self.program = train if is_local else ["-m", "samestep.sweep.cluster_job"]
        is_one = is_local and self.gpus[0] is None and settings.cfg.trainer.devices == 1
        forks.serve(can_fork=is_one and script is None and sys.platform == "linux")

    def run(self) -> int:
        """Search, and print the best trial and what to type next.

        Returns:
            0, 1 if no trial was completed, or 128 and the number of a signal.
        """
        try:
            asyncio.run(self.search())
        except asyncio.CancelledError:
            return 128 + self.signum
        counts = [f"{len(self._trials(state))} {word}" for state, word in ENDED.items()]
        print(f"{', '.join(counts)}; what they have printed is in {self.logs}")
        if not self._trials(TrialState.COMPLETE):
            return 1
        best, settings = self.study.best_trial, self.settings
        print(f"The best\n  {self._describe(best)}\nInspect\n  optuna-dashboard {self.journal}")
        again = "python train.py" if settings.cfg.cluster.name == "local" else "samestep launch"
        words = shlex.join([*settings.overrides, *settings.choose(best.params)])
        print(f"Next\n  {again} {words}", flush=True)
        return 0

    async def search(self) -> None:
        """Continue the trials that a killed search has left, and begin the others."""
        loop, this = asyncio.get_running_loop(), asyncio.current_task()
        assert this

        def stop(signum: int) -> None:
            """End the search, which waits for its trials; a second signal changes nothing."""
            if not self.signum:
                self.signum = signum
                print(f"{signal.Signals(signum).name}: the trials save and end ...", flush=True)
                this.cancel()

        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup has set SIGHUP
                loop.add_signal_handler(signum, stop, signum)
        ended, total = len(self._trials(*ENDED)), self.settings.keys.n_trials
        print(f"Search: {self.journal}: {ended} of {total} trials have ended", flush=True)
        id_of = self.storage.get_trial_id_from_study_id_trial_number
        study_id = self.storage.get_study_id_from_name(self.settings.name)
        numbers = [trial.number for trial in self._trials(TrialState.RUNNING)]
        unfinished = [Trial(self.study, id_of(study_id, number)) for number in numbers]
        if ended or unfinished:
            self.study.sampler.reseed_rng()  # the same seed would propose the first values again
        # What a killed search has left may use any of the GPUs.
        while any(map(forks.is_running, self.logs.iterdir())):
            await asyncio.sleep(POLL_S)
        await asyncio.gather(*(self.work(unfinished, gpus) for gpus in self.gpus))

    async def work(self, unfinished: list[Trial], gpus: str | None) -> None:
        """Train one trial after the other, on these GPUs."""
        total = self.settings.keys.n_trials
        while unfinished or len(self._trials(*ENDED, TrialState.RUNNING)) < total:
            trial = unfinished.pop(0) if unfinished else self.study.ask(self.settings.space)
            best, reason = None, ""
            try:
                state, best = TrialState.COMPLETE, await self.train(trial, gpus)
            except optuna.TrialPruned as error:
                state, reason = TrialState.PRUNED, str(error)
            except RunError as error:
                state, reason = TrialState.FAIL, str(error)
            trial.set_user_attr("reason", reason)
            told = self.study.tell(trial, best, state)
            print(f"[{len(self._trials(*ENDED))}/{total}] {self._describe(told)}", flush=True)

    async def train(self, trial: Trial, gpus: str | None) -> float:
        """Train a trial to its end, and return its best value.

        Raises:
            TrialPruned: if it is worse than others, says the pruner.
            RunError: if it fails.
        """
        settings, run_id = self.settings, f"{self.settings.name}-{trial.number}"
        program = [*self.program, *settings.overrides, *settings.choose(trial.params)]
        variables = {"RUN_ID": run_id, project.VARIABLE: str(project.project_folder())}
        if gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = gpus
        log = self.logs / f"{run_id}.log"
        for _ in range(MAX_STARTS):
            # A rank may outlive the process that was killed.
            while forks.is_running(log):
                await asyncio.sleep(POLL_S)
            process = forks.start(program, variables, log)
            try:
                exit_code = None
                while exit_code is None:
                    await asyncio.sleep(COPY_S if settings.copies else POLL_S)
                    exit_code = process.exitcode
                    values = self._report(trial, run_id, is_over=exit_code is not None)
            finally:
                # It is over, or bad, or the search is stopped: then it saves first.
                process.terminate()
                while process.exitcode is None:
                    await asyncio.sleep(POLL_S)
            if exit_code >= 0 and exit_code not in KILLED:
                break
        if exit_code:
            # The last error message of the log, otherwise its last line.
            text = log.read_text(errors="replace").rstrip()
            errors = re.findall(rf"(?m)^(?:\[pod/\S+\] )?{failure.PREFIX}(.+)", text)
            reason = errors[-1] if errors else text.rpartition("\n")[2]
            raise RunError(f"exit code {exit_code}: {reason}")
        if not values:
            raise RunError(f"it has logged no {settings.monitor}")
        return (max if settings.is_max else min)(values)

    def _report(self, trial: Trial, run_id: str, *, is_over: bool) -> list[float]:
        """Report the new values of a trial to Optuna; return all, one of each validation."""
        settings, run_dir = self.settings, Path(self.settings.cfg.run_root, run_id)
        if settings.copies:
            run_dir = settings.folder / "copies" / run_id
            with suppress(Exception):  # a store without an answer is asked again
                fs, root = fsspec.url_to_fs(f"{settings.copies}/{run_id}")
                run_dir.mkdir(parents=True, exist_ok=True)
                (run_dir / "metrics.csv").write_bytes(fs.cat_file(f"{root}/metrics.csv"))
        rows = read_history(run_dir)
        values = [row[settings.monitor] for row in rows if settings.monitor in row]
        if not all(map(math.isfinite, values)):
            raise RunError(f"{settings.monitor} is nan or infinite")
        reported = self.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        for step in range(len(reported), len(values)):
            trial.report(values[step], step)
            if not is_over and trial.should_prune():
                raise optuna.TrialPruned(f"after validation {step + 1}")
        return values

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        """The trials in these states, without those that were killed before they had values."""
        found = self.study.get_trials(deepcopy=False, states=states)
        return [trial for trial in found if len(trial.params) == len(self.settings.space)]

    def _describe(self, trial: FrozenTrial) -> str:
        """One line for a trial that has ended."""
        name, words = self.settings.name, self.settings.choose(trial.params)
        result = f"{ENDED[trial.state]}: {trial.user_attrs['reason']}"
        if trial.value is not None:
            result = f"{self.settings.monitor} {trial.value:.5g}"
        time = str(trial.duration).partition(".")[0]
        return "  ".join([f"{name}-{trial.number}", result, time, *words])


def share_gpus(settings: Settings) -> list[str | None]:
    """The GPUs of each trial that runs at the same time, such as ``["0,1", "2,3"]``.

    It is None for a trial that uses none, or those of a cluster.
    """
    at_once, trainer = settings.keys.trials_at_once, settings.cfg.trainer
    visible = environment.variable("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    if not gpus or trainer.accelerator == "cpu" or settings.cfg.cluster.name != "local":
        return [None] * at_once
    num, needed = len(gpus) // at_once, trainer.devices if isinstance(trainer.devices, int) else 1
    if num < needed:
        text = f"trials_at_once={at_once}: the {len(gpus)} GPUs here are enough for "
        raise ConfigError(f"{text}{len(gpus) // needed}; choose that, or trainer.accelerator=cpu")
    return [",".join(gpus[i * num : (i + 1) * num]) for i in range(at_once)]
