"""The command line of a search and its file in configs/sweep, read and checked before it begins."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from samestep.errors import ConfigError
from samestep.hydra.compose import check, check_all, find_callback, message_of
from samestep.hydra.folder import configs_folder, project_folder
from samestep.hydra.rules import BOOL, NAME, NULL, STRING, TEXT, Rule, whole
from samestep.hydra.schema import choices_of, nearest, no_such_choice, show
from samestep.launch import local_settings
from samestep.ranks import environment
from samestep.sweep import space
from samestep.sweep.space import Parameter

NODE = Rule("a group with a _target_ of optuna", lambda v: isinstance(v, dict))
OVERRIDES = Rule(
    f"a list of overrides, each {STRING}",
    lambda v: isinstance(v, list) and all(map(TEXT.holds, v)),
)
RULES: dict[str, Rule] = {
    "n_trials": whole(1),
    "trials_at_once": whole(1),
    "storage": NULL | TEXT,
    "shared_run_root": BOOL,
    "sampler": NODE,
    "pruner": NODE,
    "overrides": OVERRIDES,
}
DEFAULTS: dict[str, Any] = {
    "trials_at_once": 1,
    "storage": None,
    "shared_run_root": False,
    "sampler": {"_target_": "optuna.samplers.TPESampler"},
    "pruner": {"_target_": "optuna.pruners.MedianPruner", "n_warmup_steps": 1},
    "overrides": [],
}
SUPERVISED = ("k8s", "jobset", "pytorchjob", "kubeflow", "elastic", "elasticjob", "slurm")
"""Clusters that say how a run has ended."""
BEST = "samestep.callbacks.checkpoints.BestCheckpoint"
ARTIFACTS = "samestep.run.artifacts.Artifacts"


@dataclass
class Settings:
    """A search that was checked."""

    name: str
    values: dict[str, Any]
    """The keys of RULES."""
    parameters: list[Parameter]
    overrides: list[str]
    """Of every trial."""
    cfg: DictConfig
    """The configuration of a trial with the first values."""
    corners: list[DictConfig]
    """Configurations that have all choices, and both ends of each range, between them."""

    @property
    def folder(self) -> Path:
        """Where the search writes, and where its trials have their run directories."""
        return Path(str(self.cfg.run_root), "sweeps", self.name)

    @property
    def monitor(self) -> str:
        """The metric by which the trials are compared."""
        return metric_of(self.cfg)[0]

    @property
    def direction(self) -> Literal["minimize", "maximize"]:
        """Optuna's word for the mode of the metric."""
        return "minimize" if metric_of(self.cfg)[1] == "min" else "maximize"

    @property
    def on_cluster(self) -> bool:
        """Whether a trial is a job of a cluster and no process of this machine."""
        return str(self.cfg.cluster.name) != "local"

    @property
    def copies(self) -> str | None:
        """The address of the copies from which the metrics are read; None: the run directories."""
        node = find_callback(self.cfg, ARTIFACTS)
        url = node.url if node else None
        is_here = self.values["shared_run_root"] or self.cfg.cluster.name in ("local", "slurm")
        return None if is_here else url


def read(words: Sequence[str]) -> Settings:
    """The search that a command line describes.

    Raises:
        ConfigError: naming the mistakes.
    """
    choice, typed, overrides = split_words(words)
    path = find_file(choice)
    source = path.relative_to(project_folder()).as_posix()
    content = load(path)
    nodes = content.pop("space", None)
    values = {**DEFAULTS, **merge(content, typed)}
    refuse_wrong_values(values, source)
    parameters = space.parse(nodes, source)
    overrides = [*values["overrides"], *overrides]
    refuse_fixed(parameters, overrides)

    corners = check_space(parameters, overrides, source)
    cfg = corners[0]
    if cfg.cluster.name != "local":
        cfg = local_settings.compose_for_cluster(local_settings.to_overrides(overrides))
    name = name_search(choice, cfg, values["n_trials"])
    overrides = [word for word in overrides if not word.lstrip("+").startswith("run_id=")]
    overrides = keep_last(overrides)
    settings = Settings(name, values, parameters, overrides, cfg, corners)
    refuse_impossible(settings)
    return settings


def check_space(
    parameters: Sequence[Parameter], overrides: Sequence[str], source: str
) -> list[DictConfig]:
    """Check all choices, and both ends of each range, as ``train.py -m`` checks its values.

    Returns:
        The configurations that were checked; the first one has the first values.

    Raises:
        ConfigError: naming the mistakes; with the file, if the space is to blame.
    """
    try:
        return check_all([*overrides, *space.to_grid(parameters)], multirun=True)
    except ConfigError as error:
        check(overrides)
        raise ConfigError(f"{error} (the space of {source})") from error


def split_words(words: Sequence[str]) -> tuple[str, DictConfig, list[str]]:
    """The name of the file, the keys of the search that were typed, and overrides of the trials."""
    for word in words:
        if word.startswith("-"):
            raise ConfigError(f"{word}: no such flag; grids are trained by python train.py -m")
    choice, typed, overrides = "", OmegaConf.create({}), []
    try:
        parsed = OverridesParser.create().parse_overrides(list(words))
        for override in parsed:
            key = override.key_or_group
            if key == "sweep":
                choice = str(override.value())
            elif key.split(".")[0] in RULES:
                OmegaConf.update(typed, key, override.value())
            else:
                refuse_misspelt(key, override.value)
                overrides.append(str(override.input_line))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(message_of(error)) from None
    return choice, typed, overrides


def refuse_misspelt(key: str, value: Callable[[], Any]) -> None:
    """Raise a ConfigError for a key that is like one of a search, and is none of a run."""
    if key in OmegaConf.load(configs_folder() / "train.yaml") or "." in key or "/" in key:
        return
    near = nearest(key, RULES)
    if near and key not in choices_of(configs_folder()):
        raise ConfigError(f"{key}: no such key; did you mean {near}={show(value())}?")


def keep_last(overrides: Sequence[str]) -> list[str]:
    """The overrides without those whose key is set again later: the last value counts."""
    last = {word.partition("=")[0]: number for number, word in enumerate(overrides)}
    return [word for number, word in enumerate(overrides) if last[word.partition("=")[0]] == number]


def find_file(choice: str) -> Path:
    """The file of configs/sweep with this name."""
    names = sorted(path.stem for path in (configs_folder() / "sweep").glob("*.yaml"))
    if not choice:
        raise ConfigError(f"sweep is not set: add sweep=NAME; there is {', '.join(names)}")
    if choice not in names:
        raise ConfigError(no_such_choice("sweep", choice, names))
    return configs_folder() / "sweep" / f"{choice}.yaml"


def load(path: Path) -> dict[str, Any]:
    """The keys of a YAML file, in plain containers."""
    source = path.relative_to(project_folder()).as_posix()
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
        raise ConfigError(f"{source}: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{source}: must hold keys, not a list")
    return {str(key): value for key, value in content.items()}


def merge(content: dict[str, Any], typed: DictConfig) -> dict[str, Any]:
    """The values of a file, and what was typed instead of them."""
    for key in ("sampler", "pruner"):
        target = OmegaConf.select(typed, f"{key}._target_")
        if target is not None and target != (content.get(key) or {}).get("_target_"):
            content = {**content, key: {}}  # another class has other arguments
    merged = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(content), typed))
    assert isinstance(merged, dict)
    return {str(key): value for key, value in merged.items()}


def refuse_wrong_values(values: dict[str, Any], source: str) -> None:
    """Raise a ConfigError for keys that no search has, and for wrong values."""
    faults = []
    for key, value in values.items():
        if key not in RULES:
            near = nearest(key, [*RULES, "space"])
            hint = f"did you mean {near}?" if near else f"there is {', '.join(RULES)}, space"
            faults.append(f"{key}: no such key; {hint} ({source})")
        elif not RULES[key].holds(value):
            faults.append(f"{key}={show(value)}: must be {RULES[key].text}")
    if "n_trials" not in values:
        faults.append("n_trials is not set: add n_trials=NUMBER")
    if faults:
        raise ConfigError("\n".join(faults))


def refuse_fixed(parameters: Sequence[Parameter], overrides: Sequence[str]) -> None:
    """Raise a ConfigError if a value that is tried was also typed."""
    given = {re.split("[=@]", word.lstrip("+~"))[0] for word in overrides}
    for parameter in parameters:
        if parameter.key in given:
            raise ConfigError(
                f"{parameter.key}: is searched, so it has no fixed value; leave it out of the "
                "overrides, or out of the space"
            )


def name_search(choice: str, cfg: DictConfig, n_trials: int) -> str:
    """``run_id``, ``$RUN_ID``, or the name of the file: the same command continues the search."""
    # Kubernetes takes no underscores in the names of runs.
    name = str(cfg.run_id or environment.run_id() or choice.replace("_", "-"))
    if not NAME.holds(name) or not NAME.holds(f"{name}-{n_trials - 1}"):
        raise ConfigError(
            f"RUN_ID={name}: the names of the trials, such as {name}-{n_trials - 1}, must be "
            f"{NAME.text}"
        )
    return name


def metric_of(cfg: DictConfig) -> tuple[str, str]:
    """The metric by which the best checkpoint is chosen, and its mode.

    Raises:
        ConfigError: if there is none.
    """
    node = find_callback(cfg, BEST)
    if node is None:
        raise ConfigError(
            "callbacks.best.monitor: a search needs a BestCheckpoint, by whose metric its trials "
            "are compared; add `defaults: - default` to the callbacks"
        )
    return str(node.monitor), str(node.mode)


def refuse_impossible(settings: Settings) -> None:
    """Raise a ConfigError for a search whose trials cannot be compared, or cannot be watched."""
    metrics = {metric_of(cfg) for cfg in [settings.cfg, *settings.corners]}
    if len(metrics) > 1:
        text = " and ".join(f"{monitor} ({mode})" for monitor, mode in sorted(metrics))
        raise ConfigError(f"space: all trials are compared by one metric, and not by {text}")
    cluster = str(settings.cfg.cluster.name)
    if not settings.on_cluster:
        return
    if cluster not in SUPERVISED:
        raise ConfigError(
            f"cluster={cluster}: does not say how a run has ended; a search takes local, "
            f"{', '.join(SUPERVISED)}"
        )
    if cluster != "slurm" and not settings.copies and not settings.values["shared_run_root"]:
        raise ConfigError(
            f"cluster={cluster}: the search reads the metrics of its trials from their copies: add "
            "callbacks.artifacts.url=s3://bucket/runs, or shared_run_root=true if run_root is the "
            "same folder here and in the pods"
        )
