"""Optuna's study of a search, in a journal that survives a killed search and a full disk."""

import os
from pathlib import Path
from typing import Any

import optuna
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from optuna.samplers import BruteForceSampler, GridSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from samestep.errors import ConfigError
from samestep.hydra.compose import message_of
from samestep.sweep.settings import Settings

ENDED = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
FACTS = "search"  # the attribute of a study that says what is searched


def make_sampler_and_pruner(settings: Settings) -> tuple[Any, Any]:
    """The objects that propose values and end bad trials; None is Optuna's default.

    Raises:
        ConfigError: if they cannot be made, or the sampler tries every value.
    """
    try:
        sampler = instantiate(settings.keys.sampler, _convert_="all")
        pruner = instantiate(settings.keys.pruner, _convert_="all")
    except InstantiationException as error:
        raise ConfigError(f"sampler or pruner: {message_of(error)}") from None
    # These end a study themselves, from a callback of study.optimize(), which is not used here.
    if isinstance(sampler, GridSampler | BruteForceSampler):
        raise ConfigError(
            f"sampler._target_=optuna.samplers.{type(sampler).__name__}: tries every value, "
            "whatever n_trials says; train a grid: python train.py -m KEY=VALUE,VALUE"
        )
    return sampler, pruner


class Study:
    """What is known of the trials of a search, on the disk.

    Args:
        settings: what is searched.
        sampler: proposes values.
        pruner: ends bad trials.

    Raises:
        ConfigError: if an earlier search of this name was another one.
    """

    def __init__(self, settings: Settings, sampler: Any, pruner: Any) -> None:
        self.settings = settings
        self.journal = settings.folder / "journal.log"
        repair_journal(self.journal)
        self.storage = JournalStorage(JournalFileBackend(str(self.journal)))
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna = optuna.create_study(
            storage=self.storage,
            sampler=sampler,
            pruner=pruner,
            study_name=settings.name,
            direction="maximize" if settings.is_max else "minimize",
            load_if_exists=True,
        )
        facts = [*map(str, settings.space.items()), *settings.overrides, settings.monitor]
        before = self.optuna.user_attrs.get(FACTS, facts)
        if before != facts:
            raise ConfigError(
                f"{settings.folder} holds a search with {sorted({*before} - {*facts})} instead "
                f"of {sorted({*facts} - {*before})}; use the old values, or another RUN_ID"
            )
        self.optuna.set_user_attr(FACTS, facts)

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """The trials in these states."""
        found = self.optuna.get_trials(deepcopy=False, states=states)
        # A search that was killed between two lines of the journal leaves a trial that lacks
        # values. It has no run, and does not count.
        return [trial for trial in found if len(trial.params) == len(self.settings.space)]

    def num_ended(self) -> int:
        """Trials that are complete, pruned or failed."""
        return len(self.trials(*ENDED))

    def is_full(self) -> bool:
        """Whether no more trials may be started."""
        num_started = len(self.trials(*ENDED, TrialState.RUNNING))
        return num_started >= self.settings.keys.n_trials

    def resume_trials(self) -> list[Trial]:
        """The trials that a killed search has left unfinished."""
        study_id = self.storage.get_study_id_from_name(self.settings.name)
        unfinished = []
        # Optuna gives only a frozen copy of such a trial, which cannot report values.
        for trial in self.trials(TrialState.RUNNING):
            id = self.storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
            unfinished.append(Trial(self.optuna, id))
        if unfinished or self.num_ended():
            # With the same seed, the sampler would propose the values of the first trials again.
            self.optuna.sampler.reseed_rng()
        return unfinished

    def propose(self) -> Trial:
        """A new trial with values for all keys."""
        return self.optuna.ask(self.settings.space)

    def report(self, trial: Trial, values: list[float], *, is_over: bool) -> None:
        """Report the metric after each validation, without those that are known already.

        Raises:
            TrialPruned: if a trial that is not over is bad, says the pruner.
        """
        trials = self.optuna.get_trials(deepcopy=False)
        # Optuna warns of a value that is reported twice, and a resumed trial has old values.
        for step in range(len(trials[trial.number].intermediate_values), len(values)):
            trial.report(values[step], step)
            if not is_over and trial.should_prune():
                raise optuna.TrialPruned(f"after validation {step + 1}")

    def end_trial(self, trial: Trial, state: TrialState, best: float | None, reason: str) -> str:
        """Write the result of a trial into the journal, and return a line that describes it."""
        # First the reason: a search that is killed here runs the trial once more.
        trial.set_user_attr("reason", reason)
        return self.describe(self.optuna.tell(trial, best, state))

    def describe(self, trial: FrozenTrial) -> str:
        """One line for a trial that has ended."""
        result = f"{ENDED[trial.state]}: {trial.user_attrs['reason']}"
        if trial.value is not None:
            result = f"{self.settings.monitor} {trial.value:.5g}"
        duration = str(trial.duration).partition(".")[0]
        name = f"{self.settings.name}-{trial.number}"
        return "  ".join([name, result, duration, *self.settings.choose(trial.params)])


def repair_journal(journal: Path) -> None:
    """Remove what a killed search or a full disk may have left in Optuna's journal.

    The caller holds the lock of the search, so no other process writes there.
    """
    # Optuna waits for this lock forever.
    Path(f"{journal}.lock").unlink(missing_ok=True)
    if journal.exists():
        # Optuna cannot read a journal whose last line is incomplete.
        os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)
