"""The command line and configs/, composed and checked before anything runs. Imports no torch.

Hydra composes the chosen files twice: as the user asked, and plain, without overrides of values and
without the groups experiment, debug and local. Every key of the first must exist in the second,
with a value of the same type. ``samestep.hydra.rules`` says what a type cannot say.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.types import RunMode
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from samestep.errors import ConfigError
from samestep.hydra import rules
from samestep.hydra.folder import configs_folder
from samestep.hydra.schema import (
    LAID_OVER,
    NO_GROUPS,
    Comparison,
    Fault,
    choices_of,
    flatten,
    no_such_choice,
)
from samestep.ranks.secrets import hide_assigned

NEEDED = (
    "data",
    "model",
    "trainer",
    "cluster",
)  # groups of which a run needs a file; data=null too
OPTIONAL = ("callbacks", "logger")  # groups that may be empty: logger=null


def help_text() -> str:
    """The help in ``train.yaml``, with all groups and choices; Hydra's own takes a second."""
    configs = configs_folder()
    groups = [
        textwrap.fill(f"  {group:20}{', '.join(names)}", 100, subsequent_indent=22 * " ")
        for group, names in choices_of(configs).items()
        if names
    ]
    text = str(OmegaConf.load(configs / "train.yaml").hydra.help.template)
    return text.replace("$APP_CONFIG_GROUPS", "\n".join(groups))


def check(
    overrides: Sequence[str], *, multirun: bool = False, configs: Path | None = None
) -> DictConfig:
    """Compose ``train.yaml`` with these overrides, and check it.

    Args:
        overrides: as typed, such as ``["model=mlp", "seed=1"]``.
        multirun: allow sweeps such as ``seed=1,2``. Each value is checked together with the first
            value of every other sweep; a range is checked at its first and its last value.
        configs: directory of ``train.yaml``, if it is not that of the project.

    Returns:
        The configuration, not yet resolved; in a sweep, the configuration of its first run. Its
        key ``choices`` says which file was chosen in each group: ``{"data": "mnist", ...}``.

    Raises:
        ConfigError: naming the faults, one line each.
    """
    return check_all(overrides, multirun=multirun, configs=configs)[0]


def check_all(
    overrides: Sequence[str], *, multirun: bool, configs: Path | None = None
) -> list[DictConfig]:
    """The configurations of all runs that ``check`` checks."""
    configs = configs or configs_folder()
    # In a run of a sweep, hydra.main has initialized Hydra; it does not need that any more.
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(configs.absolute()), version_base="1.3"):
        try:
            return [_compose(run, configs) for run in _list_runs(overrides, multirun)]
        except ConfigError:
            raise
        except MissingConfigException as error:
            group, _, choice = str(error.missing_cfg_file).rpartition("/")
            if not group:
                raise ConfigError(f"{configs / choice}.yaml: there is no such file") from None
            names = choices_of(configs).get(group, error.options or [])
            raise ConfigError(no_such_choice(group, choice, names)) from None
        except OSError as error:
            raise ConfigError(f"a key or a choice cannot be used: {error.strerror}") from None
        except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
            raise ConfigError(message_of(error)) from None


def message_of(error: Exception) -> str:
    """What Hydra or OmegaConf says, in one line. It may repeat an override, but no secret."""
    if isinstance(error, OverrideParseException):
        word = hide_assigned(str(error.override))
        key, sign, value = word.partition("=")
        if not sign:
            return f"{word}: is no override; write KEY=VALUE or GROUP=CHOICE"
        return (
            f"{word}: cannot be read; write text with signs or letters such as ä in quotes "
            f"within quotes: \"{key}='{value}'\""
        )
    text, *_ = " ".join(f"{error} {error.__cause__ or ''}".split()).split(" object_type=")
    if list_in_file := re.match(r"In '(.+)': .*Cannot merge DictConfig with ListConfig", text):
        return f"configs/{list_in_file[1]}.yaml: must hold keys, not a list"
    return textwrap.shorten(hide_assigned(text), 300)


def rewrite_overrides(overrides: Sequence[str]) -> list[str]:
    """The overrides as ``check`` gives them to Hydra; ``hydra.main`` must get the same ones."""
    groups = choices_of(configs_folder())
    parser = OverridesParser.create()
    return [_rewrite(override, groups) for override in parser.parse_overrides(list(overrides))]


def _rewrite(override: Override, groups: Mapping[str, Sequence[str]]) -> str:
    """One override as Hydra gets it: a value as ``++key=value``, whatever the user typed.

    Hydra then takes keys that no file has, so that our check sees them and can say which key was
    probably meant. Choices of files, deletions and Hydra's own keys stay as typed.
    """
    line, group = str(override.input_line), override.key_or_group
    if override.is_delete() or override.is_hydra_override():
        return line
    if not group:
        raise ConfigError(f"{line}: has no key; write KEY=VALUE or GROUP=CHOICE")
    if group in NO_GROUPS:
        raise ConfigError(f"{line}: is for another command, samestep {group} {line} ...")
    # A sweep has no single value yet; it is checked run by run.
    value = "" if override.is_sweep_override() else override.value()
    if group not in groups or isinstance(value, dict):
        return "++" + line.lstrip("+")
    if value is None:  # Hydra refuses logger=null, and takes an empty list for the same
        return f"{group}=[]"
    if not isinstance(value, str | list):
        raise ConfigError(no_such_choice(group, value, groups[group]))
    return line


def _list_runs(overrides: Sequence[str], multirun: bool) -> list[list[str]]:
    """The overrides of one run; in a sweep, of each run that is checked."""
    options: list[list[str]] = []
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    for override in parser.parse_overrides(list(overrides)):
        line = str(override.input_line)
        if not override.is_sweep_override() or override.is_hydra_override():
            options.append([line])
        elif not multirun:
            raise ConfigError(
                f"{hide_assigned(line)}: is several values; put -m before it to run one after the "
                "other, [ ] around a list, or quotes within quotes around text"
            )
        else:
            values = list(override.sweep_string_iterator()) or [""]
            values = [values[0], values[-1]] if override.is_range_sweep() else values
            options.append([f"{override.get_key_element()}={value}" for value in values])
    first = [values[0] for values in options]
    runs = [first]
    for index, values in enumerate(options):
        runs += [[*first[:index], value, *first[index + 1 :]] for value in values[1:]]
    return runs


def _compose(lines: list[str], configs: Path) -> DictConfig:
    """The configuration of one run, or a ConfigError with its faults."""
    groups = choices_of(configs)
    overrides = OverridesParser.create().parse_overrides(lines)
    rewritten = [_rewrite(override, groups) for override in overrides]
    cfg = hydra.compose("train", rewritten, return_hydra_config=True)
    choices = _find_choices(cfg, rewritten, groups)
    _refuse(
        f"{group}: a run needs one of {', '.join(groups[group])}"
        for group in NEEDED
        if choices.get(group) not in groups[group]
        # The model may have loaders of its own, which `samestep.hydra.build` looks for.
        and not (group == "data" and choices.get(group) == [])
    )
    reference = _compose_reference(choices, configs)
    with open_dict(cfg), open_dict(reference):
        del cfg["hydra"], reference["choices"]
        if cfg.get("choices") == {}:  # it is ours to write: any other value is an unknown key
            del cfg["choices"]

    # A choice of a file sets no key itself.
    pairs = zip(overrides, rewritten, strict=True)
    typed = [o.key_or_group for o, text in pairs if text.startswith(("++", "~"))]
    _leave_out_keys_of_other_clusters(cfg, reference, choices, typed, configs)

    project_rules = rules.load_project_rules(cfg.rules)
    added = [o.key_or_group for o in overrides if o.is_add() or o.is_force_add()]
    faults = Comparison(cfg, reference, groups, project_rules, added).faults()
    _refuse_debug_mode_of_other_data(faults, choices, configs)
    _refuse(f"{line}{_find_origin(key, choices, typed, configs)}" for key, line in faults)
    _refuse([*rules.contradictions(cfg), *project_rules.contradictions(cfg)])
    _refuse(rules.choose_modes(cfg, {**rules.METRIC_MODES, **project_rules.metric_modes}))

    with open_dict(cfg):
        cfg.choices = choices
    OmegaConf.to_container(cfg, resolve=True)  # raises where a file's interpolation has no value
    return cfg


def _find_choices(
    cfg: DictConfig, rewritten: list[str], groups: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Which file was chosen in each group; a list where several were."""
    choices = dict(cfg.hydra.runtime.choices)
    choices = {group: name for group, name in choices.items() if group in groups}
    missing = [group for group in (*NEEDED, *OPTIONAL) if group not in choices]
    if not missing:
        return choices
    # Hydra does not tell the choices of a list, such as callbacks=[early_stopping,ema].
    loader = GlobalHydra.instance().config_loader()
    files = loader.compute_defaults_list("train", rewritten, RunMode.RUN).defaults
    for group in missing:
        # A file that another file of the group includes was not chosen itself.
        paths = [f.config_path for f in files if not str(f.parent).startswith(f"{group}/")]
        names = [path.rpartition("/")[2] for path in paths if path.rpartition("/")[0] == group]
        choices[group] = names
    return choices


def _compose_reference(choices: Mapping[str, Any], configs: Path) -> DictConfig:
    """The same choice of files, without overrides of values and what is laid over them."""
    lines = [f"{group}=[]" for group in LAID_OVER if (configs / group).is_dir()]
    for group, choice in choices.items():
        if group not in LAID_OVER:
            value = f"[{','.join(choice)}]" if isinstance(choice, list) else choice
            lines.append(f"{group}={value}")
    try:
        return hydra.compose("train", lines)
    except ConfigCompositionException:
        # A group that is not among the defaults, such as +model/head=linear, needs a plus again.
        top = [line for line in lines if "/" not in line]
        known = hydra.compose("train", top, return_hydra_config=True).hydra.runtime.choices
        signs = ["" if "/" not in line or line.split("=")[0] in known else "+" for line in lines]
        return hydra.compose("train", [f"{s}{line}" for s, line in zip(signs, lines, strict=True)])


def _leave_out_keys_of_other_clusters(
    cfg: DictConfig,
    reference: DictConfig,
    choices: Mapping[str, Any],
    typed: Sequence[str],
    configs: Path,
) -> None:
    """Remove keys of ``cluster`` that configs/local sets and only other clusters have.

    One file serves all clusters of a machine: ``cluster.volume`` in it must not stop a run without
    a cluster. A key that no cluster has stays, and is refused.
    """
    local = local_cluster_keys(choices, configs)
    if not local:
        return
    files = (configs / "cluster").glob("*.yaml")
    known = {key.split(".")[1] for file in files for key in _keys_of(file, "cluster")}
    for key in local:
        if key in known and key not in reference.cluster and f"cluster.{key}" not in typed:
            with open_dict(cfg.cluster):
                cfg.cluster.pop(key, None)


def local_cluster_keys(choices: Mapping[str, Any], configs: Path | None = None) -> list[str]:
    """The keys directly below ``cluster`` that the chosen files of configs/local set, sorted."""
    keys = local_keys(choices, configs)
    return sorted({key.split(".")[1] for key in keys if key.startswith("cluster.")})


def local_keys(choices: Mapping[str, Any], configs: Path | None = None) -> list[str]:
    """The full keys that the chosen files of configs/local set, sorted."""
    files = local_files(choices, configs)
    return sorted({key for file in files for key in _keys_of(file, "local")})


def local_files(choices: Mapping[str, Any], configs: Path | None = None) -> list[Path]:
    """The chosen files of configs/local: the settings of this machine."""
    configs = configs or configs_folder()
    files = [configs / "local" / f"{name}.yaml" for name in _names_of(choices.get("local"))]
    return [file for file in files if file.exists()]


def find_overridden(
    choices: Mapping[str, Any], typed: Sequence[str], configs: Path | None = None
) -> dict[str, str]:
    """The keys that are not as their default files have them, and what has set them.

    Args:
        choices: the chosen file of each group, as ``check`` returns them.
        typed: overrides of the command line.
        configs: directory of ``train.yaml``.

    Returns:
        By full key, such as ``model.optimizer.lr`` or ``model`` for a choice of a file:
        ``configs/experiment/mine.yaml`` or ``the command line``.
    """
    configs = configs or configs_folder()
    found: dict[str, str] = {}
    for group in LAID_OVER:
        for name in _names_of(choices.get(group)):
            found |= _set_by(group, name, configs)
    keys = [re.split("[=@]", word.lstrip("+~"))[0].replace("/", ".") for word in typed]
    return found | dict.fromkeys(keys, "the command line")


def find_callback(cfg: DictConfig, target: str) -> DictConfig | None:
    """The first node of ``cfg.callbacks`` for this class or a subclass of it, under any name.

    For programs that do not build the callbacks; those that do look at the objects. Only a class
    that is not ours is imported.
    """
    nodes: list[DictConfig] = [n for n in (cfg.callbacks or {}).values() if "_target_" in n]
    for node in nodes:
        if node._target_ == target:
            return node
    for node in nodes:
        if str(node._target_).startswith(("samestep.", "lightning.")):
            continue
        # ``build.check_arguments`` names a class that does not exist.
        with suppress(Exception):
            if issubclass(get_object(node._target_), get_object(target)):
                return node
    return None


def _names_of(choice: Any) -> list[str]:
    """The files that were chosen in a group: none, one, or several."""
    if isinstance(choice, list):
        return choice
    return [choice] if choice else []


def _set_by(group: str, name: str, configs: Path) -> dict[str, str]:
    """The keys that one file sets, and those of the files of its group that it includes."""
    file = configs / group / f"{name}.yaml"
    if not file.exists():
        return {}
    found: dict[str, str] = {}
    keys = _keys_of(file, group) - {"defaults"}
    for entry in OmegaConf.select(OmegaConf.load(file), "defaults") or []:
        if isinstance(entry, str) and entry != "_self_":
            found |= _set_by(group, entry, configs)
        elif isinstance(entry, DictConfig):
            keys |= {str(key).split("/", 1)[-1].replace("/", ".") for key in entry}
    return found | dict.fromkeys(keys, f"configs/{group}/{name}.yaml")


def _refuse_debug_mode_of_other_data(
    faults: Sequence[Fault], choices: Mapping[str, Any], configs: Path
) -> None:
    """Raise one error if the file of ``debug=`` sets keys that the chosen data do not have."""
    mode, data = choices.get("debug"), choices.get("data")
    file = configs / "debug" / f"{mode}.yaml"
    if not file.exists():
        return
    set_keys = {key for key in _keys_of(file, "debug") if key.startswith("data.")}
    unknown = [key for key, line in faults if key in set_keys and "no such key" in line]
    if unknown:
        raise ConfigError(
            f"debug={mode}: sets {', '.join(unknown)}, which data={data} does not have; "
            f"leave out debug={mode}, or choose the data that it is for"
        )


def _find_origin(key: str, choices: Mapping[str, Any], typed: Sequence[str], configs: Path) -> str:
    """The chosen file that sets ``key``, in brackets; nothing if an override does."""
    for override in typed:
        if f"{key}.".startswith(f"{override}.") or f"{override}.".startswith(f"{key}."):
            return ""
    # What is laid over the others is asked first, because its value counts.
    for group in sorted(choices, key=lambda group: group not in LAID_OVER):
        for name in _names_of(choices[group]):
            file = configs / group / f"{name}.yaml"
            if file.exists() and key in _keys_of(file, group):
                return f" (configs/{group}/{name}.yaml)"
    return ""


def _keys_of(file: Path, group: str) -> set[str]:
    """The full keys that one file of configs/ sets."""
    node = OmegaConf.load(file)
    assert isinstance(node, DictConfig)
    is_global = "@package _global_" in file.read_text()
    prefix = "" if is_global else f"{group.replace('/', '.')}."
    return {f"{prefix}{key}" for key in flatten(node)}


def _refuse(faults: Iterable[str]) -> None:
    """Raise a ConfigError with these lines, if there are any."""
    if message := "\n".join(faults):
        raise ConfigError(message)
