"""The command line of a search and its file in configs/sweep, checked before the first trial."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
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

    def choose(self, params: Mapping[str, Any]) -> list[str]:
        """The overrides for the values of a trial. Real numbers are short, to be read."""
        is_real = {key: isinstance(kind, FloatDistribution) for key, kind in self.space.items()}
        return [f"{k}={v:.5g}" if is_real[k] else f"{k}={v}" for k, v in params.items()]


def read(words: Sequence[str]) -> Settings:
    """The search that a command line describes; otherwise a ConfigError names the errors."""
    try:
        name, keys, parsed = parse(words)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error.msg).splitlines()[0]}") from None
    except (HydraException, YAMLError) as error:
        raise ConfigError(message_of(error)) from None
    space = {o.get_key_element(): to_distribution(o) for o in parsed if o.is_sweep_override()}
    overrides = [str(o.input_line) for o in parsed if not o.is_sweep_override()]
    last = f"{name}-{keys.n_trials - 1}"
    if not space or keys.n_trials < 1 or keys.trials_at_once < 1 or not NAME.holds(last):
        raise ConfigError(
            "a search needs sweep=NAME, or RUN_ID=NAME and a key with its values, such as "
            "'model.optimizer.lr=tag(log,interval(1e-4,1e-1))'; n_trials and trials_at_once must "
            f"be at least 1, and the name of the last trial, {last}, {NAME.text}"
        )
    # All choices and both ends of each range are checked, as `train.py -m` checks its values.
    ends = {key: getattr(d, "choices", None) or (d.low, d.high) for key, d in space.items()}
    grid = [f"{key}={','.join(map(str, values))}" for key, values in ends.items()]
    corners = check_all([*overrides, *grid], multirun=True)
    cfg, copies = corners[0], None
    is_local = cfg.cluster.name == "local"
    if is_local:
        num_ranks = cfg.trainer.devices if isinstance(cfg.trainer.devices, int) else 1
        environment.limit_threads(keys.trials_at_once * num_ranks)  # before torch is imported
    from samestep.hydra.build import check_arguments

    for corner in corners:
        check_arguments(corner)  # what each trial would reject when it builds its parts
    if not is_local:
        copies = check_cluster(cfg, overrides, last)
    checkpoints = find_callback(cfg, CHECKPOINTS)
    if checkpoints.get("monitor") is None:
        raise ConfigError("a search compares trials by a metric: callbacks.checkpoints.monitor")
    monitor, is_max = checkpoints.monitor, checkpoints.mode == "max"
    return Settings(name, keys, space, overrides, cfg, monitor, is_max, copies)


def check_cluster(cfg: DictConfig, overrides: Sequence[str], run_id: str) -> str | None:
    """Check a trial as before a submit; return where the copy of its run is read, if not here."""
    is_slurm = cfg.cluster.name == "slurm"
    url = None if is_slurm else find_callback(cfg, ARTIFACTS).get("url")
    if "commands" in cfg.cluster or not (url or is_slurm):
        raise ConfigError(
            f"cluster={cfg.cluster.name}: a search needs local, slurm, or Kubernetes, "
            "where it reads metrics from copies: callbacks.artifacts.url=s3://bucket/runs"
        )
    cfg, documents = prepare(overrides, run_id)
    check_run(cfg, documents, "submit")
    return url


def parse(words: Sequence[str]) -> tuple[str, Keys, list[Override]]:
    """The name of a search, its keys, and the overrides of its trials and its space."""
    parse_overrides = OverridesParser.create().parse_overrides
    choice, typed, others = "", OmegaConf.create({}), []
    for override in parse_overrides(list(words)):
        key = override.key_or_group
        if key == "sweep":
            choice = str(override.value())
        elif key.split(".")[0] in {field.name for field in fields(Keys)}:
            OmegaConf.update(typed, key, override.value())
        else:
            others.append(str(override.input_line))
    files = {path.stem: path for path in (configs_folder() / "sweep").glob("*.yaml")}
    if choice and choice not in files:
        raise ConfigError(no_such_choice("sweep", choice, sorted(files)))
    content: Any = OmegaConf.load(files[choice]) if choice else {}
    for key in ("sampler", "pruner"):
        if OmegaConf.select(typed, f"{key}._target_"):
            content.pop(key, None)  # another class has other arguments
    keys: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Keys), content, typed))

    space = [f"{key}={values}" for key, values in keys.space.items()]
    # The last one of a key counts: a value that is typed replaces those that a file searches.
    parsed = {o.key_or_group: o for o in parse_overrides([*space, *keys.overrides, *others])}
    for key in parsed.keys() & {"run_id", "run_dir"}:
        raise ConfigError(f"{key}: each trial has its own; RUN_ID=... names the search")
    name = environment.run_id() or choice.replace("_", "-")  # Kubernetes takes no underscore
    return name, keys, list(parsed.values())


def to_distribution(override: Override) -> Any:
    """What Optuna samples for a key: Hydra's ``choice``, ``interval`` or ``range``."""
    values: Any = override.value()
    try:
        is_log = "log" in values.tags
        if override.is_choice_sweep():
            pairs = zip(values.list, override.sweep_string_iterator(), strict=True)
            # Numbers stay numbers, which plots can order.
            return CategoricalDistribution([v if type(v) in (int, float) else t for v, t in pairs])
        if override.is_range_sweep():
            numbers = sorted(values.range())
            low, high, step = numbers[0], numbers[-1], abs(values.step)
        else:
            low, high, step = values.start, values.end, None
        if isinstance(low, int):
            return IntDistribution(low, high, log=is_log, step=step or 1)
        return FloatDistribution(low, high, log=is_log, step=step)
    except (ValueError, IndexError, AttributeError) as error:
        raise ConfigError(f"{override.input_line}: {error}") from None


def find_callback(cfg: DictConfig, target: str) -> Any:
    """The node of ``cfg.callbacks`` for this class or a subclass of it; empty if there is none."""
    for node in (cfg.callbacks or {}).values():
        kind = get_object(node._target_)
        if isinstance(kind, type) and issubclass(kind, get_object(target)):
            return node
    return {}
