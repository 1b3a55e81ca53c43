"""Optuna's record of a search: the study, and the trials that this folder has begun.

The journal is a file of lines that are only added. A search holds the claim of its folder, so it
may mend what a killed one has left: a lock, or half of a last line.
"""

import json
import secrets
import textwrap
from pathlib import Path
from typing import Any

import optuna
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, JournalStorage, get_storage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from samestep.errors import ConfigError
from samestep.keys import Nature, nature_of
from samestep.ranks.secrets import redact
from samestep.run.files import write_text
from samestep.sweep.settings import Settings

JOURNAL = "journal.log"
OWNER = "owner"  # the folder whose search has begun a trial
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
STARTED = (*FINISHED, TrialState.RUNNING)


class Record:
    """The study of a search.

    Raises:
        ConfigError: if the storage cannot be opened, or holds another search of this name.
    """

    def __init__(self, settings: Settings) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.settings = settings
        self.owner = read_owner(settings.folder)
        self.is_shared = settings.values["storage"] is not None
        self.storage = open_storage(settings)
        self.study = optuna.create_study(
            storage=self.storage,
            study_name=settings.name,
            direction=settings.direction,
            load_if_exists=True,
        )
        self._compare()
        strategies = build_strategies(settings, num_trials=len(self.trials()))
        self.study.sampler, self.study.pruner = strategies

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """The trials in these states, or all."""
        return self.study.get_trials(deepcopy=False, states=states or None)

    def unfinished(self) -> list[Trial]:
        """The trials of this folder that a search has begun and not finished."""
        mine = [t for t in self.trials(TrialState.RUNNING) if self._is_mine(t)]
        study_id = self.storage.get_study_id_from_name(self.settings.name)
        find_id = self.storage.get_trial_id_from_study_id_trial_number
        return [Trial(self.study, find_id(study_id, trial.number)) for trial in mine]

    def ask(self) -> Trial:
        """Begin a new trial."""
        trial = self.study.ask()
        trial.set_user_attr(OWNER, self.owner)
        return trial

    def _is_mine(self, trial: FrozenTrial) -> bool:
        # A search that was killed at once after "ask" had no time to say whose the trial is.
        return trial.user_attrs.get(OWNER, None if self.is_shared else self.owner) == self.owner

    def _compare(self) -> None:
        """Refuse to mix two searches in one study; a new study gets the facts of this search."""
        settings = self.settings
        facts: dict[str, Any] = {
            "space": [parameter._asdict() for parameter in settings.parameters],
            "overrides": [
                word
                for word in settings.overrides
                # Each trial of a search that continues may run elsewhere.
                if nature_of(word.lstrip("+~").partition("=")[0]) < Nature.PLACE
            ],
            "monitor": f"{settings.monitor}, {settings.direction}",
        }
        # The storage turns tuples into lists.
        for name, fact in json.loads(json.dumps(facts)).items():
            before = self.study.user_attrs.get(name)
            if before is None:
                self.study.set_user_attr(name, fact)
            elif before != fact:
                raise ConfigError(
                    f"{settings.folder} holds a search with other values of {name}:\n  "
                    f"{shorten(before)}\nnow it is\n  {shorten(fact)}\n"
                    "Repeat the old values, or begin another search with RUN_ID=<another name>"
                )


def shorten(fact: Any) -> str:
    """A fact of a search on one line, for a message."""
    if isinstance(fact, str):
        return fact
    words = [x if isinstance(x, str) else f"{x['key']}: {x}" for x in fact]
    return textwrap.shorten(" ".join(words) or "none", 300)


def read_owner(folder: Path) -> str:
    """A name that only this folder has, also if it is moved."""
    path = folder / OWNER
    if not path.exists():
        write_text(path, secrets.token_hex(8))
    return path.read_text().strip()


def open_storage(settings: Settings) -> BaseStorage:
    """The journal in the folder of the search, or the storage with the given address."""
    url = settings.values["storage"]
    if url is None:
        path = settings.folder / JOURNAL
        mend_journal(path)
        return JournalStorage(JournalFileBackend(str(path)))
    try:
        return get_storage(url)
    except Exception as error:  # whatever the library of a database raises
        text = " ".join(str(error).split())[:300]
        raise ConfigError(redact(f"storage={url}: {type(error).__name__} {text}")) from None


def mend_journal(path: Path) -> None:
    """Remove the lock of a search that was killed, and the end of a line that it wrote."""
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        with path.open("r+b") as file:
            file.truncate(len(whole))


def build_strategies(settings: Settings, num_trials: int) -> tuple[BaseSampler, BasePruner]:
    """The sampler, which proposes values, and the pruner, which ends trials.

    Args:
        settings: of the search.
        num_trials: how many trials the study has.

    Raises:
        ConfigError: if there is no such class, or it refuses an argument.
    """
    sampler = dict(settings.values["sampler"])
    # After a restart the same seed would propose the first values again.
    if isinstance(sampler.get("seed"), int):
        sampler["seed"] += num_trials
    pruner = settings.values["pruner"]
    return build("sampler", sampler, BaseSampler), build("pruner", pruner, BasePruner)


def build(key: str, node: dict[str, Any], base: type) -> Any:
    """The sampler or the pruner of ``key``.

    Raises:
        ConfigError: if there is no such class, or it refuses an argument.
    """
    if not str(node.get("_target_", "")).startswith(f"optuna.{key}s."):
        raise ConfigError(
            f"{key}._target_={node.get('_target_')}: must be a class of optuna.{key}s"
        )
    try:
        built = instantiate(node, _convert_="all")
    except (InstantiationException, ImportError) as error:
        cause = error.__cause__ or error
        text = " ".join(str(cause).split())
        raise ConfigError(f"{key}: {node['_target_']} refuses: {text[:300]}") from None
    if not isinstance(built, base):
        raise ConfigError(f"{key}._target_={node['_target_']}: must be a {base.__name__}")
    return built
