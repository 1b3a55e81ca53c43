"""The loop of a search: start trials, read their metrics, end those that are not worth it."""

import math
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from optuna.trial import FrozenTrial, Trial, TrialState

from samestep.errors import ConfigError
from samestep.ranks import environment
from samestep.ranks.failure import EXIT_SIGTERM
from samestep.sweep.settings import Settings
from samestep.sweep.study import FINISHED, STARTED, Record
from samestep.sweep.trial_process import Metrics, TrialProcess

POLL_S = 0.5
MAX_STARTS = 3  # of a trial that others stop or kill
KILLED = (EXIT_SIGTERM, 128 + signal.SIGKILL)
ENDING, REASON, SECONDS = "ending", "reason", "seconds"
"""Attributes of a trial: how the search has decided that it ends, why, and how long it ran here."""


@dataclass
class Active:
    """A trial that has not ended."""

    trial: Trial
    process: TrialProcess
    metrics: Metrics
    overrides: list[str]
    """Only those that the search has chosen."""
    ending: str
    """PRUNED or FAIL, once the search has told the process to stop; otherwise empty."""
    num_reported: int
    started: float
    num_starts: int = 0


class Search:
    """Runs the trials of a study until there are enough of them, or until a signal comes.

    Args:
        settings: what to search.
        record: the study.
        script: the program of a trial, a stand-in for ``train.py`` in tests.
    """

    def __init__(self, settings: Settings, record: Record, script: Path) -> None:
        self.settings = settings
        self.record = record
        self.script = script
        self.active: list[Active] = []
        self.signum = 0
        self.device_groups = share_devices(settings)

    def run(self) -> int:
        """Search.

        Returns:
            0 when there are enough trials, or 128 and the number of the signal that came.
        """
        with self._signals():
            for trial in self.record.unfinished():
                self.active.append(self._make_active(trial))
            while not self.signum:
                self._begin_trials()
                if not self.active:
                    return 0
                self._look_at_all()
                time.sleep(POLL_S)
            self._stop_all()
        return 128 + self.signum

    def _begin_trials(self) -> None:
        """Start new trials while there is room for them, and those that wait for a process."""
        at_once = self.settings.values["trials_at_once"]
        limit = self.settings.values["n_trials"]
        while len(self.active) < at_once and len(self.record.trials(*STARTED)) < limit:
            self.active.append(self._make_active(self.record.ask()))
        # After a restart there may be more unfinished trials than may run at once.
        num_running = sum(a.process.is_running() for a in self.active)
        for active in self.active:
            is_idle = active.process.process is None and not active.process.is_running()
            if is_idle and not active.ending and num_running < at_once:
                num_running += self._start(active)

    def _make_active(self, trial: Trial) -> Active:
        """A trial that is new, or that an earlier search has begun: with the same values."""
        settings = self.settings
        values = [(parameter, parameter.suggest(trial)) for parameter in settings.parameters]
        overrides = [parameter.override(value) for parameter, value in values]
        run_id = f"{settings.name}-{trial.number}"
        process = TrialProcess(
            run_id,
            settings.folder,
            [*settings.overrides, *overrides],
            on_cluster=settings.on_cluster,
            devices=trial.user_attrs.get("devices"),
            script=self.script,
        )
        known = {t.number: t for t in self.record.trials(TrialState.RUNNING)}[trial.number]
        return Active(
            trial,
            process,
            find_metrics(settings, run_id),
            overrides,
            ending=trial.user_attrs.get(ENDING, ""),
            num_reported=len(known.intermediate_values),
            started=time.monotonic(),
        )

    def _start(self, active: Active) -> bool:
        """Start the process of a trial, on devices that no other trial uses."""
        if self.device_groups:
            used = {d for a in self.active if a is not active and a.process.is_running()
                    for d in (a.process.devices or "").split(",")}  # fmt: skip
            free = [group for group in self.device_groups if used.isdisjoint(group.split(","))]
            if not free:
                return False  # a trial of an earlier search still has them
            active.process.devices = free[0]
            active.trial.set_user_attr("devices", free[0])
        active.num_starts += 1
        return active.process.start()

    def _look_at_all(self) -> None:
        for active in list(self.active):
            exit_code = active.process.poll()
            values = active.metrics.read(now=exit_code is not None)
            self._report(active, values)
            is_over = active.ending and not active.process.is_running()
            if exit_code is not None or is_over:
                self._end(active, exit_code or 0, values)

    def _report(self, active: Active, values: Sequence[float]) -> None:
        """Tell Optuna the new values; stop the trial if it is pruned, or if one is no number."""
        for index in range(active.num_reported, len(values)):
            if active.ending:
                return
            value = values[index]
            active.trial.report(value, step=index)
            active.num_reported = index + 1
            if not math.isfinite(value):
                reason = f"{self.settings.monitor} is {value} in validation {index + 1}"
                self._stop(active, "FAIL", reason)
            elif active.trial.should_prune():
                self._stop(active, "PRUNED", f"after validation {index + 1}")

    def _stop(self, active: Active, ending: str, reason: str) -> None:
        """End a trial before its time. First the study gets to know: this process may be killed."""
        active.trial.set_user_attr(REASON, reason)
        active.trial.set_user_attr(ENDING, ending)
        active.ending = ending
        active.process.send(signal.SIGTERM)

    def _end(self, active: Active, exit_code: int, values: Sequence[float]) -> None:
        """Tell Optuna how a trial has ended, or start it again if others have stopped it."""
        was_killed = exit_code < 0 or exit_code in KILLED
        if not active.ending and was_killed and active.num_starts < MAX_STARTS:
            active.process.process = None  # the loop starts it again
            return
        state, value, reason = TrialState.COMPLETE, None, ""
        if active.ending:
            state = TrialState[active.ending]
        elif exit_code != 0:
            state, reason = TrialState.FAIL, f"exit code {exit_code}: {active.process.last_error()}"
        elif not values:
            state, reason = TrialState.FAIL, f"the run has logged no {self.settings.monitor}"
        else:
            value = max(values) if self.settings.direction == "maximize" else min(values)
        if reason:
            active.trial.set_user_attr(REASON, reason)
        active.trial.set_user_attr(SECONDS, round(time.monotonic() - active.started, 1))
        told = self.record.study.tell(active.trial, value, state)
        self.active.remove(active)
        self._print(active, told)

    def _print(self, active: Active, told: FrozenTrial) -> None:
        """One line for a trial that has ended."""
        done = len(self.record.trials(*FINISHED))
        result = f"{self.settings.monitor} {told.value:.4f}" if told.value is not None else ""
        if told.state is not TrialState.COMPLETE:
            result = f"{told.state.name.lower()}: {told.user_attrs.get(REASON, '')}"
        seconds = timedelta(seconds=round(told.user_attrs[SECONDS]))
        facts = [f"[{done}/{self.settings.values['n_trials']}]", active.process.run_id, result]
        print("  ".join([*facts, str(seconds), *active.overrides]), flush=True)

    def _stop_all(self) -> None:
        """Let all trials save and end, and wait for them."""
        name = signal.Signals(self.signum).name
        running = [active for active in self.active if active.process.is_running()]
        if running:
            print(f"{name}: {len(running)} trials save and end ...", flush=True)
        for active in running:
            active.process.send(signal.SIGTERM)
        while any(active.process.is_running() for active in running):
            for active in running:
                active.process.poll()
            time.sleep(0.1)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Remember the first signal; at the second Ctrl-C the trials are killed."""

        def remember(signum: int, frame: FrameType | None) -> None:
            if self.signum and signum == signal.SIGINT:
                for active in self.active:
                    active.process.kill()
                raise KeyboardInterrupt
            self.signum = self.signum or signum

        before = {}
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup has set SIGHUP
                before[signum] = signal.signal(signum, remember)
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


def find_metrics(settings: Settings, run_id: str) -> Metrics:
    """Where this machine reads the metrics of a trial."""
    if settings.copies is None:
        return Metrics(settings.folder / run_id, settings.monitor)
    url = f"{settings.copies.rstrip('/')}/{run_id}"
    return Metrics(settings.folder / "copies" / run_id, settings.monitor, url)


def share_devices(settings: Settings) -> list[str]:
    """For each trial that runs at the same time the GPUs it may see, such as ``["0,1", "2,3"]``.

    Returns:
        Nothing without GPUs, or if one trial after the other may use all of them.

    Raises:
        ConfigError: if there are too few GPUs.
    """
    at_once, trainer = settings.values["trials_at_once"], settings.cfg.trainer
    if settings.on_cluster or at_once == 1 or trainer.accelerator not in ("auto", "gpu"):
        return []
    gpus = find_gpus()
    if not gpus:
        return []
    per_trial: Any = trainer.devices
    if per_trial == "auto":
        per_trial = max(1, len(gpus) // at_once)
    if at_once * per_trial > len(gpus):
        raise ConfigError(
            f"trials_at_once={at_once}: each trial needs {per_trial} of the {len(gpus)} GPUs of "
            f"this machine; choose at most {len(gpus) // per_trial}, or trainer.accelerator=cpu"
        )
    return [",".join(gpus[i * per_trial : (i + 1) * per_trial]) for i in range(at_once)]


def find_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; without torch."""
    visible = environment.variable("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [word.strip() for word in visible.split(",") if word.strip() not in ("", "-1")]
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []
