"""The loop around Optuna's study: start trials, report their metrics, end the bad ones."""

import fcntl
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import optuna
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from samestep.errors import ConfigError
from samestep.hydra import folder
from samestep.hydra.adapter import topology_of
from samestep.hydra.compose import message_of
from samestep.ranks import environment, failure
from samestep.run import lock
from samestep.run.metrics import read_history
from samestep.sweep.forks import Forked, Forks, loaded_libraries
from samestep.sweep.settings import Settings

POLL_S, COPY_S = 0.5, 5.0  # between two looks at a trial, and at the copy of its run in a store
MAX_STARTS = 3  # of a trial that is killed from outside
RUNNING, COMPLETE = TrialState.RUNNING, TrialState.COMPLETE
ENDED = {COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}


class Running:
    """A trial that has not ended: Optuna's ``trial``, as it was ``before`` this search began."""

    def __init__(self, trial: Trial, settings: Settings, before: FrozenTrial | None = None) -> None:
        self.trial, self.settings = trial, settings
        self.num_reported = len(before.intermediate_values) if before else 0
        self.num_starts = 0
        self.run_id = f"{settings.name}-{trial.number}"
        self.run_dir = Path(settings.cfg.run_root, self.run_id)
        self.log = settings.folder / "logs" / f"{self.run_id}.log"
        self.gpus: str | None = None  # those that it may use, such as 0,1; None: all
        self.process: subprocess.Popen[bytes] | Forked | None = None
        self.verdict: tuple[TrialState, str] | None = None  # why it was told to stop
        self._copied = 0.0

    def start(self, script: Path, forks: Forks | None) -> None:
        """Start ``script`` (of tests: a stand-in), unless a process of this trial still runs."""
        is_local = self.settings.cfg.cluster.name == "local"
        program = [str(script)] if is_local else ["-m", "samestep.sweep.cluster_job"]
        words = [*self.settings.overrides, *self.settings.choose(self.trial.params)]
        variables = environment.variables() | {
            "RUN_ID": self.run_id,
            folder.VARIABLE: str(folder.project_folder()),
        }
        if self.gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = self.gpus
        self.log.parent.mkdir(exist_ok=True)
        # The lock belongs to the open file: every process of a trial holds it until it ends.
        with self.log.open("ab") as output, suppress(BlockingIOError):
            fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.num_starts += 1
            forked = forks.start([*program, *words], variables, output) if forks else None
            self.process = forked or subprocess.Popen(
                [sys.executable, *program, *words],
                env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is for the search alone
            )  # fmt: skip

    def values(self, *, now: bool) -> list[float]:
        """The metric after each validation; of a copy in a store as of some seconds ago."""
        run_dir = self.run_dir
        if self.settings.copies:
            run_dir = self.settings.folder / "copies" / self.run_id
            if now or time.monotonic() > self._copied + COPY_S:
                self._copied = time.monotonic()
                with suppress(Exception):  # a store without an answer is asked again
                    fs, root = fsspec.url_to_fs(f"{self.settings.copies}/{self.run_id}")
                    run_dir.mkdir(parents=True, exist_ok=True)
                    (run_dir / "metrics.csv").write_bytes(fs.cat_file(f"{root}/metrics.csv"))
        monitor = self.settings.monitor
        return [row[monitor] for row in read_history(run_dir) if monitor in row]

    def find_error(self, exit_code: int) -> str:
        """Why the process has failed: its last error message, otherwise its last line."""
        log = re.sub(r"^\[pod/\S+\] ", "", self.log.read_text(errors="replace"), flags=re.MULTILINE)
        lines = [line.strip() for line in log.splitlines()]
        errors = [line for line in lines if line.startswith(failure.PREFIX)]
        text = next(filter(None, [*errors[::-1], *lines[::-1]]), "no output")
        return f"exit code {exit_code}: {text.removeprefix(failure.PREFIX)}"


class Search:
    """The trials of a study. A ConfigError says if Optuna or an earlier search contradicts."""

    def __init__(self, settings: Settings, script: Path | None = None) -> None:
        self.settings, self.script = settings, script or folder.project_folder() / "train.py"
        self.gpus = share_gpus(settings)  # those that no trial uses
        self.active: list[Running] = []
        self.signum = 0
        nodes = (settings.keys.sampler, settings.keys.pruner)
        try:
            sampler, pruner = (instantiate(node, _convert_="all") for node in nodes)
        except InstantiationException as error:
            raise ConfigError(f"sampler or pruner: {message_of(error)}") from None
        lock.acquire(settings.folder)  # until this process ends
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
        can_fork = script is None and is_one_process_on_cpu(settings)
        self.forks = Forks(loaded_libraries()) if can_fork else None

    def run(self) -> int:
        """Search; return 0, 1 if no trial was completed, or 128 and the number of a signal."""
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup has set SIGHUP
                signal.signal(signum, self._remember)
        ended, total = len(self.trials(*ENDED)), self.settings.keys.n_trials
        print(f"Search: {self.journal}: {ended} of {total} trials have ended", flush=True)
        id_of = self.storage.get_trial_id_from_study_id_trial_number
        study_id = self.storage.get_study_id_from_name(self.settings.name)
        unfinished = [
            Running(Trial(self.study, id_of(study_id, t.number)), self.settings, t)
            for t in self.trials(RUNNING)
        ]
        if ended or unfinished:
            self.study.sampler.reseed_rng()  # the same seed would propose the first values again
        while not self.signum:
            self._start_trials(unfinished)
            if not self.active:
                return self._leave()
            for running in [*self.active]:
                if running.process:
                    self._inspect(running, running.process)
            time.sleep(POLL_S)
        print(f"{signal.Signals(self.signum).name}: the trials save and end ...", flush=True)
        processes = [running.process for running in self.active if running.process]
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
        return 128 + self.signum

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """The trials in these states, without those that were killed before they had values."""
        found = self.study.get_trials(deepcopy=False, states=states)
        return [trial for trial in found if len(trial.params) == len(self.settings.space)]

    def _start_trials(self, unfinished: list[Running]) -> None:
        """Begin trials while there is room, and start those that wait for a process."""
        while self.gpus:
            if unfinished:
                running = unfinished.pop(0)
            elif len(self.trials(*ENDED, RUNNING)) < self.settings.keys.n_trials:
                running = Running(self.study.ask(self.settings.space), self.settings)
            else:
                break
            running.gpus = self.gpus.pop(0)
            self.active.append(running)
        waiting = [running for running in self.active if not running.process]
        # What a killed search has left may use any of the GPUs.
        if not any(lock.is_held(running.run_dir) for running in [*waiting, *unfinished]):
            for running in waiting:
                running.start(self.script, self.forks)

    def _inspect(self, running: Running, process: subprocess.Popen[bytes] | Forked) -> None:
        """Report the new values of a trial; end it if it is bad, or if its process has ended."""
        exit_code, monitor = process.poll(), self.settings.monitor
        values = running.values(now=exit_code is not None)
        verdict = None
        for step in range(running.num_reported, len(values)):
            running.trial.report(values[step], step)
            running.num_reported = step + 1
            if exit_code is None and running.trial.should_prune():
                verdict = TrialState.PRUNED, f"after validation {len(values)}"
        if not all(map(math.isfinite, values)):
            verdict = TrialState.FAIL, f"{monitor} is nan or infinite"
        if verdict and not running.verdict:
            running.verdict = verdict
            process.terminate()
        if exit_code is not None:
            self._end(running, exit_code, values)

    def _end(self, running: Running, exit_code: int, values: list[float]) -> None:
        """Tell Optuna how a trial has ended, or let it be started again if it was killed."""
        (state, reason), best = running.verdict or (None, ""), None
        is_killed = exit_code < 0 or exit_code in (failure.EXIT_SIGTERM, 128 + signal.SIGKILL)
        if not state and is_killed and running.num_starts < MAX_STARTS:
            running.process = None
            return
        if not state and exit_code:
            state, reason = TrialState.FAIL, running.find_error(exit_code)
        elif not state and not values:
            state, reason = TrialState.FAIL, f"it has logged no {self.settings.monitor}"
        elif not state:
            state, best = COMPLETE, (max if self.settings.is_max else min)(values)
        running.trial.set_user_attr("reason", reason)
        told = self.study.tell(running.trial, best, state)
        self.active.remove(running)
        self.gpus.append(running.gpus)
        count = f"{len(self.trials(*ENDED))}/{self.settings.keys.n_trials}"
        print(f"[{count}] {self._describe(told)}", flush=True)

    def _leave(self) -> int:
        """Print the best trial, and what to type next; return 1 if no trial was completed."""
        counts = [f"{len(self.trials(state))} {word}" for state, word in ENDED.items()]
        print(f"{', '.join(counts)}; what they have printed is in {self.settings.folder}/logs")
        if not self.trials(COMPLETE):
            return 1
        best, settings = self.study.best_trial, self.settings
        print(f"The best\n  {self._describe(best)}\nInspect\n  optuna-dashboard {self.journal}")
        words = [*settings.overrides, *settings.choose(best.params)]
        if settings.cfg.cluster.name == "local":
            words = ["python", "train.py", *words]
        else:
            words = ["samestep", "launch", *words]
        print(f"Next\n  {shlex.join(words)}", flush=True)
        return 0

    def _describe(self, trial: FrozenTrial) -> str:
        """One line for a trial that has ended."""
        result = f"{ENDED[trial.state]}: {trial.user_attrs['reason']}"
        if trial.state is COMPLETE:
            result = f"{self.settings.monitor} {trial.value:.5g}"
        time = str(trial.duration).partition(".")[0]
        words = self.settings.choose(trial.params)
        return "  ".join([f"{self.settings.name}-{trial.number}", result, time, *words])

    def _remember(self, signum: int, _: object) -> None:
        self.signum = self.signum or signum


def is_one_process_on_cpu(settings: Settings) -> bool:
    """Whether each trial is one process that uses no GPU, on Linux."""
    if settings.cfg.cluster.name != "local" or sys.platform != "linux":
        return False
    accelerator, devices, _ = topology_of(settings.cfg)
    has_gpus = accelerator == "auto" and torch.cuda.device_count() > 0
    return accelerator in ("auto", "cpu") and devices == 1 and not has_gpus


def share_gpus(settings: Settings) -> list[str | None]:
    """The GPUs of each trial that runs at the same time, such as ``["0,1", "2,3"]``; None: all."""
    at_once, trainer = settings.keys.trials_at_once, settings.cfg.trainer
    visible = environment.variable("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    has_none = not gpus or trainer.accelerator not in ("auto", "gpu", "cuda")
    if at_once == 1 or has_none or settings.cfg.cluster.name != "local":
        return [None] * at_once
    num = trainer.devices if isinstance(trainer.devices, int) else max(1, len(gpus) // at_once)
    if at_once * num > len(gpus):
        text = f"trials_at_once={at_once}: the {len(gpus)} GPUs here are enough for "
        raise ConfigError(f"{text}{len(gpus) // num}; choose that, or trainer.accelerator=cpu")
    return [",".join(gpus[i * num : (i + 1) * num]) for i in range(at_once)]
