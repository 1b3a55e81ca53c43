"""The command line of a search and its file in configs/sweep, checked before the first trial."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from yaml import YAMLError

from samestep.errors import ConfigError
from samestep.hydra.compose import check_all, message_of
from samestep.hydra.project import configs_folder
from samestep.hydra.rules import NAME
from samestep.hydra.suggestions import no_such_choice
from samestep.launch.main import check_run, prepare
from samestep.ranks import environment

CHECKPOINTS = "samestep.callbacks.checkpoints.Checkpoints"
ARTIFACTS = "samestep.run.artifacts.Artifacts"


@dataclass
class Keys:
    """The keys of a file in configs/sweep, which can also be typed."""

    n_trials: int = 20
    trials_at_once: int = 1
    sampler: dict[str, Any] | None = None  # None: Optuna's default
    pruner: dict[str, Any] | None = None
    overrides: list[str] = field(default_factory=list)
    space: dict[str, str] = field(default_factory=dict)


@dataclass
class Settings:
    """A search that was checked."""

    name: str
    keys: Keys
    space: dict[str, Any]  # Optuna's distributions by key of the configuration
    overrides: list[str]  # of every trial
    cfg: DictConfig  # of a trial
    monitor: str  # the metric by which the trials are compared
    is_max: bool  # whether more of it is better
    copies: str | None  # address of the copies of the runs, if their directories are elsewhere

    @property
    def folder(self) -> Path:
        """Where the search itself writes."""
        return Path(self.cfg.run_root, "sweeps", self.name)

    @property
    def is_local(self) -> bool:
        """Whether the trials run on this machine."""
        return bool(self.cfg.cluster.name == "local")

    def choose(self, params: Mapping[str, Any]) -> list[str]:
        """The overrides for the values of a trial."""
        overrides = []
        for key, value in params.items():
            # Five places of a sampled learning rate are as good as sixteen, and can be read.
            if isinstance(self.space[key], FloatDistribution):
                value = f"{value:.5g}"
            overrides.append(f"{key}={value}")
        return overrides


def read(words: Sequence[str]) -> Settings:
    """The search that a command line describes, checked.

    Raises:
        ConfigError: naming the errors.
    """
    try:
        name, keys, parsed = parse(words)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error.msg).splitlines()[0]}") from None
    except (HydraException, YAMLError) as error:
        raise ConfigError(message_of(error)) from None
    space = {}
    overrides = []
    for override in parsed:
        if override.is_sweep_override():
            space[override.get_key_element()] = to_distribution(override)
        else:
            overrides.append(str(override.input_line))
    last = f"{name}-{keys.n_trials - 1}"
    check_search(keys, space, last)
    corners = check_corners(keys, space, overrides)
    cfg, copies = corners[0], None
    if cfg.cluster.name != "local":
        copies = check_cluster(cfg, overrides, last)
    checkpoints = find_callback(cfg, CHECKPOINTS)
    if checkpoints.get("monitor") is None:
        raise ConfigError("a search compares trials by a metric: callbacks.checkpoints.monitor")
    return Settings(
        name=name,
        keys=keys,
        space=space,
        overrides=overrides,
        cfg=cfg,
        monitor=checkpoints.monitor,
        is_max=checkpoints.mode == "max",
        copies=copies,
    )


def check_search(keys: Keys, space: Mapping[str, Any], last: str) -> None:
    """Reject a search without a name or space, or whose last trial could not have its name."""
    if not space:
        raise ConfigError(
            "a search needs sweep=NAME, or RUN_ID=NAME and a key with its values, such as "
            "'model.optimizer.lr=tag(log,interval(1e-4,1e-1))'"
        )
    for key in ("n_trials", "trials_at_once"):
        number = getattr(keys, key)
        if number < 1:
            raise ConfigError(f"{key}={number}: must be at least 1")
    if last.startswith("-"):
        raise ConfigError("a search without sweep=NAME needs a name: RUN_ID=NAME")
    if not NAME.holds(last):
        raise ConfigError(f"{last}, the name of the last trial, {NAME.text}")


def check_corners(
    keys: Keys, space: Mapping[str, Any], overrides: Sequence[str]
) -> list[DictConfig]:
    """Check every choice and both ends of each range, as ``train.py -m`` checks its values.

    Returns:
        The checked configurations.
    """
    # A value that is rejected should be found now, not by the trial that happens to draw it.
    grid = []
    for key, distribution in space.items():
        values = getattr(distribution, "choices", None) or (distribution.low, distribution.high)
        grid.append(f"{key}={','.join(map(str, values))}")
    corners = check_all([*overrides, *grid], multirun=True, read=copy.deepcopy)
    if corners[0].cluster.name == "local":
        # Now, because the next line imports torch, which then has its number of threads.
        environment.limit_threads(keys.trials_at_once * num_devices(corners[0]))
    from samestep.hydra.build import check_arguments

    for corner in corners:
        # Some values are rejected only by the object that is built of them.
        check_arguments(corner)
    return corners


def num_devices(cfg: DictConfig) -> int:
    """How many devices a trial needs. With devices=auto it uses what it sees, and needs one."""
    devices = cfg.trainer.devices
    return 1 if devices == "auto" else int(devices)


def check_cluster(cfg: DictConfig, overrides: Sequence[str], run_id: str) -> str | None:
    """Check a trial as before a submit; return where the copy of its run is read, if not here."""
    is_slurm = cfg.cluster.name == "slurm"
    # The nodes of Slurm share run_root with this machine, pods do not.
    url = None if is_slurm else find_callback(cfg, ARTIFACTS).get("url")
    if "commands" in cfg.cluster or not (url or is_slurm):
        raise ConfigError(
            f"cluster={cfg.cluster.name}: a search needs local, slurm, or Kubernetes, "
            "where it reads metrics from copies: callbacks.artifacts.url=s3://bucket/runs"
        )
    cfg, manifests = prepare(overrides, run_id)
    check_run(cfg, manifests, "submit")
    return url


def parse(words: Sequence[str]) -> tuple[str, Keys, list[Override]]:
    """The name of a search, its keys, and the overrides of its trials and its space."""
    parse_overrides = OverridesParser.create().parse_overrides
    choice, typed, others = split_words(parse_overrides(list(words)))
    content = load_file(choice)
    for key in ("sampler", "pruner"):
        # Another class has other arguments: the file's must not be merged into them.
        if OmegaConf.select(typed, f"{key}._target_"):
            content.pop(key, None)
    merged = OmegaConf.merge(OmegaConf.structured(Keys), content, typed)
    keys: Any = OmegaConf.to_object(merged)

    space = [f"{key}={values}" for key, values in keys.space.items()]
    # If a key comes twice, the last one wins: a typed value replaces the range of a file.
    last_of_key = {}
    for override in parse_overrides([*space, *keys.overrides, *others]):
        last_of_key[override.key_or_group] = override
    for key in ("run_id", "run_dir"):
        if key in last_of_key:
            raise ConfigError(f"{key}: each trial has its own; RUN_ID=... names the search")
    # Pods are named after the search, and Kubernetes allows no underscore in their names.
    name = environment.run_id() or choice.replace("_", "-")
    return name, keys, list(last_of_key.values())


def split_words(overrides: Sequence[Override]) -> tuple[str, DictConfig, list[str]]:
    """The chosen file, the typed keys of the search, and the overrides of its trials."""
    choice, typed, others = "", OmegaConf.create({}), []
    names = OmegaConf.structured(Keys).keys()
    for override in overrides:
        key = override.key_or_group
        if key == "sweep":
            choice = str(override.value())
        elif key.split(".")[0] in names:
            OmegaConf.update(typed, key, override.value())
        else:
            reject_misspelt(key, str(override.input_line), names)
            others.append(str(override.input_line))
    return choice, typed, others


def reject_misspelt(key: str, line: str, names: Iterable[str]) -> None:
    """Reject an override whose key is nearly one of the search: trials know nothing of those."""
    near = get_close_matches(key, names, n=1, cutoff=0.85)
    if near and key not in OmegaConf.load(configs_folder() / "train.yaml"):
        raise ConfigError(f"{line}: no such key; did you mean {line.replace(key, near[0], 1)}?")


def load_file(choice: str) -> Any:
    """The content of a file in configs/sweep; empty if none was chosen."""
    if not choice:
        return {}
    files = {path.stem: path for path in (configs_folder() / "sweep").glob("*.yaml")}
    if choice not in files:
        raise ConfigError(no_such_choice("sweep", choice, sorted(files)))
    return OmegaConf.load(files[choice])


def to_distribution(override: Override) -> Any:
    """Optuna's distribution for a key: Hydra's ``choice``, ``interval`` or ``range``."""
    try:
        if override.is_choice_sweep():
            return to_categorical(override)
        return to_numbers(override)
    # Hydra's parser accepts some values that Optuna rejects, such as an empty range.
    except (ValueError, IndexError, AttributeError) as error:
        raise ConfigError(f"{override.input_line}: {error}") from None


def to_categorical(override: Override) -> CategoricalDistribution:
    """The values of a ``choice``."""
    sweep: Any = override.value()
    choices = []
    for value, text in zip(sweep.list, override.sweep_string_iterator(), strict=True):
        # Numbers stay numbers, which plots can order. Others, such as a list, are kept as typed.
        choices.append(value if type(value) in (int, float) else text)
    return CategoricalDistribution(choices)


def to_numbers(override: Override) -> IntDistribution | FloatDistribution:
    """The numbers of an ``interval`` or a ``range``."""
    sweep: Any = override.value()
    is_log = "log" in sweep.tags
    if override.is_range_sweep():
        # Python's ranges end before stop and may go down; Optuna's include both ends.
        numbers = sorted(sweep.range())
        low, high, step = numbers[0], numbers[-1], abs(sweep.step)
    else:
        low, high, step = sweep.start, sweep.end, None
    if isinstance(low, int):
        return IntDistribution(low, high, log=is_log, step=step or 1)
    return FloatDistribution(low, high, log=is_log, step=step)


def find_callback(cfg: DictConfig, target: str) -> Any:
    """The node of ``cfg.callbacks`` for this class or a subclass of it; empty if there is none."""
    for node in cfg.callbacks.values():
        kind = get_object(node._target_)
        if isinstance(kind, type) and issubclass(kind, get_object(target)):
            return node
    return {}
