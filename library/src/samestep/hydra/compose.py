"""The command line and configs/, composed and checked before anything runs. Imports no torch.

Hydra composes the chosen files twice: as the user asked, and plain, without overrides of values and
without the groups experiment, debug and local. Every key of the first must exist in the second,
with a value of the same type. ``samestep.hydra.rules`` says what a type cannot say.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
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
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from samestep.errors import ConfigError
from samestep.hydra import rules
from samestep.hydra.project import (
    config_folders,
    configs_folder,
    find_config,
    project_folder,
    search_path_override,
)
from samestep.hydra.schema import (
    NOT_GROUPS,
    OVERLAYS,
    choices_of,
    compare,
    flatten,
    is_below,
    no_such_choice,
)
from samestep.ranks.secrets import hide_assigned

NEEDED = ("data", "model", "trainer", "cluster")  # a run needs a file of each; data=null too
OPTIONAL = ("callbacks", "logger")  # groups that may be empty: logger=null


def help_text() -> str:
    """The help in ``train.yaml``, with all groups and choices; Hydra's own takes a second."""
    configs = configs_folder()
    groups = [
        textwrap.fill(f"  {group:20}{', '.join(names)}", 100, subsequent_indent=22 * " ")
        for group, names in choices_of(*config_folders()).items()
        if names
    ]
    text = str(OmegaConf.load(configs / "train.yaml").hydra.help.template)
    return text.replace("$APP_CONFIG_GROUPS", "\n".join(groups))


def check(overrides: Sequence[str], *, multirun: bool = False) -> DictConfig:
    """Compose ``train.yaml`` with these overrides, as they were typed, and check it.

    With ``multirun`` it allows sweeps such as ``seed=1,2``. Each value is checked together with the
    first value of every other sweep; a range is checked at its first and its last value.

    Returns:
        The configuration, not yet resolved; in a sweep, the configuration of its first run. Its
        key ``choices`` says which file was chosen in each group: ``{"data": "mnist", ...}``.

    Raises:
        ConfigError: naming the faults, one line each.
    """
    return check_all(overrides, multirun=multirun)[0]


def check_all(overrides: Sequence[str], *, multirun: bool) -> list[DictConfig]:
    """The configurations of all runs that ``check`` checks."""
    configs = configs_folder()
    # In a run of a sweep, hydra.main has initialized Hydra; it does not need that any more.
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(configs.absolute()), version_base="1.3"):
        try:
            return [_compose(run) for run in _list_runs(overrides, multirun)]
        except ConfigError:
            raise
        except MissingConfigException as error:
            group, _, choice = str(error.missing_cfg_file).rpartition("/")
            if not group:
                raise ConfigError(f"{configs / choice}.yaml: there is no such file") from None
            names = choices_of(*config_folders()).get(group, error.options or [])
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
            return f"{word}: is not an override; write KEY=VALUE or GROUP=CHOICE"
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
    groups = choices_of(*config_folders())
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return [*(_rewrite(override, groups) for override in parsed), *search_path_override()]


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
    if group in NOT_GROUPS:
        raise ConfigError(f"{line}: is for another command, samestep {group} {line} ...")
    # A sweep has no single value yet; it is checked run by run.
    value = "" if override.is_sweep_override() else override.value()
    if group not in groups or isinstance(value, dict):
        return "++" + line.lstrip("+")
    if value is None:  # Hydra rejects logger=null, and takes an empty list instead
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


def _compose(lines: list[str]) -> DictConfig:
    """The configuration of one run, or a ConfigError with its faults."""
    groups = choices_of(*config_folders())
    overrides = OverridesParser.create().parse_overrides(lines)
    rewritten = [_rewrite(override, groups) for override in overrides]
    words = [*rewritten, *search_path_override()]
    cfg = hydra.compose("train", words, return_hydra_config=True)
    choices = _find_choices(cfg, words, groups)
    reject(
        f"{group}: a run needs one of {', '.join(groups[group])}"
        for group in NEEDED
        if choices.get(group) not in groups[group]
        # The model may have loaders of its own, which `samestep.hydra.build` looks for.
        and not (group == "data" and choices.get(group) == [])
    )
    reference = _compose_reference(choices)
    with open_dict(cfg), open_dict(reference):
        del cfg["hydra"], reference["choices"]
        if cfg.get("choices") == {}:  # it is ours to write: any other value is an unknown key
            del cfg["choices"]

    # A choice of a file sets no key itself.
    pairs = zip(overrides, rewritten, strict=True)
    typed = [o.key_or_group for o, text in pairs if text.startswith(("++", "~"))]
    project_rules = rules.load_project_rules(cfg.rules)
    added = [o.key_or_group for o in overrides if o.is_add() or o.is_force_add()]
    faults = compare(cfg, reference, groups, project_rules, added)
    if faults:
        # Overrides count more than files: of the key, or of a node above or below it.
        is_typed = {
            key: any(is_below(key, [word]) or is_below(word, [key]) for word in typed)
            for key, _ in faults
        }
        files = find_origins(choices, groups)
        reject(
            f"{line} ({files[key]})" if key in files and not is_typed[key] else line
            for key, line in faults
        )
    reject([*rules.contradictions(cfg), *project_rules.contradictions(cfg)])

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


def _compose_reference(choices: Mapping[str, Any]) -> DictConfig:
    """The same choice of files, without overrides of values and what is laid over them."""
    groups = choices_of(*config_folders())
    lines = search_path_override()
    lines += [f"{group}=[]" for group in OVERLAYS if group in groups]
    for group, choice in choices.items():
        if group not in OVERLAYS:
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


def find_overridden(choices: Mapping[str, Any], typed: Sequence[str]) -> dict[str, str]:
    """The keys that are not as their default files have them, and what has set them.

    By full key, such as ``model.optimizer.lr`` or ``model`` for a choice of a file, it is
    ``configs/experiment/mine.yaml`` or ``the command line``.
    """
    keys = [re.split("[=@]", word.lstrip("+~"))[0].replace("/", ".") for word in typed]
    files = find_origins(choices, OVERLAYS)
    return files | dict.fromkeys(keys, "the command line")


def find_origins(choices: Mapping[str, Any], groups: Iterable[str]) -> dict[str, str]:
    """The keys that the chosen files of these groups set, and the file whose value counts."""
    found: dict[str, str] = {}
    # What is laid over the others comes last.
    for group in sorted(groups, key=lambda group: group in OVERLAYS):
        choice = choices.get(group) or []
        for name in [choice] if isinstance(choice, str) else choice:
            found |= _keys_of(group, name)
    return found


def _keys_of(group: str, name: str) -> dict[str, str]:
    """The keys that one file sets, or a file of its group that it includes, and which of them."""
    path, found = find_config(group, name), dict[str, str]()
    if path is None:
        return found
    node = OmegaConf.load(path)
    assert isinstance(node, DictConfig)
    keys = []
    for entry in node.pop("defaults", None) or []:
        if isinstance(entry, DictConfig):
            keys += [str(key).split("/", 1)[-1].replace("/", ".") for key in entry]
        elif entry != "_self_":
            found |= _keys_of(group, str(entry))
    is_global = "@package _global_" in path.read_text()
    prefix = "" if is_global else f"{group.replace('/', '.')}."
    keys += [f"{prefix}{key}" for key in flatten(node)]
    # A folder of the search path may be anywhere.
    project = project_folder()
    shown = path.relative_to(project) if path.is_relative_to(project) else path
    return found | dict.fromkeys(keys, shown.as_posix())


def reject(faults: Iterable[str]) -> None:
    """Raise a ConfigError with these lines, each once; without any, do nothing."""
    if message := "\n".join(dict.fromkeys(faults)):
        raise ConfigError(message)
