"""Composes configs/ and the command line, and checks the result. Imports no torch.

Hydra composes the chosen files twice: once with everything, and once as a reference, without the
overrides of values and without the groups experiment, debug and local. Every key of the first must
exist in the reference, with a value of the same type; plain Hydra would accept a misspelt key in a
file, and run with the default. ``samestep.hydra.rules`` adds what a type cannot express.
"""

import copy
import re
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import hydra
from hydra.core.global_hydra import GlobalHydra
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
from samestep.hydra import option_keys, overrides, rules
from samestep.hydra.nodes import flatten, is_below, map_values, resolve_or_raise
from samestep.hydra.origins import find_origins
from samestep.hydra.project import (
    choices_of,
    config_folders,
    configs_folder,
    search_path_override,
)
from samestep.hydra.schema import OVERLAYS, Comparison, Fault
from samestep.hydra.suggestions import no_such_choice
from samestep.ranks import environment
from samestep.ranks.secrets import hide_assigned

# A run needs a file of each group; and what else may be chosen. With data=null the model may have
# loaders of its own, which `samestep.hydra.build` checks.
NEEDED: dict[str, list[Any]] = {"data": [[]], "model": [], "trainer": [], "cluster": []}
OPTIONAL = ("callbacks", "logger")  # groups that may be empty: logger=null
COMPUTED = re.compile(r"\$\{[^}]*[:$]")  # ${oc.env:HOME}, ${a.${b}}; not ${a.b}
SPECIAL = re.compile(r"[{~]|\._\w+=|^\+*rules=")  # {a: 1}, ${a}, ~/data, model._target_=CLASS
Found = TypeVar("Found")


def help_text() -> str:
    """The help in ``train.yaml``, with all groups and choices."""
    # Not Hydra's --help: it composes the whole configuration first, which takes a second.
    groups = []
    for group, names in choices_of(*config_folders()).items():
        if names:
            line = f"  {group:20}{', '.join(names)}"
            groups.append(textwrap.fill(line, 100, subsequent_indent=22 * " "))
    text = str(OmegaConf.load(configs_folder() / "train.yaml").hydra.help.template)
    return text.replace("$APP_CONFIG_GROUPS", "\n".join(groups))


def check(lines: Sequence[str], *, multirun: bool = False) -> DictConfig:
    """Compose ``train.yaml`` with these overrides, as they were typed, and check the result.

    With ``multirun``, sweeps such as ``seed=1,2`` are allowed. Each value is checked together with
    the first value of every other sweep; a range is checked at its first and last value.

    Returns:
        The configuration, not yet resolved; of a sweep, that of its first run. Its key ``choices``
        has the chosen file of each group: ``{"data": "mnist", ...}``.

    Raises:
        ConfigError: with all faults, one line each.
    """
    return check_all(lines, multirun=multirun, read=copy.deepcopy)[0]


def check_all(
    lines: Sequence[str], *, multirun: bool, read: Callable[[DictConfig], Found]
) -> list[Found]:
    """What ``read`` returns for the configuration of each run that ``check`` checks.

    ``read`` must not keep the configuration, which is changed to that of the next run.
    """
    with initialized():
        options = overrides.list_options(lines, multirun=multirun)
        first = [values[0] for values in options]
        variation = Variation(_compose(first))
        found = [read(variation.cfg)]
        for index, values in enumerate(options):
            for value in values[1:]:
                cfg = variation.cfg
                if not variation.replace(value):
                    cfg = _compose([*first[:index], value, *first[index + 1 :]]).cfg
                found.append(read(cfg))
        return found


def compose_unchecked(lines: Sequence[str]) -> Any:
    """The configuration with these overrides in plain containers, neither checked nor resolved."""
    with initialized():
        cfg = hydra.compose("train", overrides.rewrite_overrides(lines))
        return OmegaConf.to_container(cfg, enum_to_str=True)


def expand_grid(lines: Sequence[str]) -> list[overrides.GridRun]:
    """Every run of a grid; its configurations are not checked.

    Raises:
        ConfigError: if an override cannot be read.
    """
    with initialized():
        return overrides.list_grid(lines)


@contextmanager
def initialized() -> Iterator[None]:
    """Let Hydra find configs/ within this block, and turn its errors into a ConfigError."""
    # If hydra.main has started this program, it does not need its own any more.
    GlobalHydra.instance().clear()
    # Whatever is wrong from here on, the user has typed keys, not arguments.
    option_keys.use_keys()
    configs = configs_folder()
    with hydra.initialize_config_dir(str(configs.absolute()), version_base="1.3"):
        try:
            yield
        except MissingConfigException as error:
            raise _missing_file(error) from None
        except OSError as error:
            raise ConfigError(f"a key or a choice cannot be used: {error.strerror}") from None
        except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
            # A ConfigError of ours is a ValueError too, and already has its message.
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(message_of(error)) from None


def _missing_file(error: MissingConfigException) -> ConfigError:
    group, _, choice = str(error.missing_cfg_file).rpartition("/")
    if not group:
        return ConfigError(f"{configs_folder() / choice}.yaml: there is no such file")
    names = choices_of(*config_folders()).get(group, error.options or [])
    return ConfigError(no_such_choice(group, choice, names))


def message_of(error: Exception) -> str:
    """The message of Hydra or OmegaConf in one line, without secrets that were typed."""
    if isinstance(error, OverrideParseException):
        word = hide_assigned(str(error.override))
        key, sign, value = word.partition("=")
        if not sign:
            return f"{word}: is not an override; write KEY=VALUE or GROUP=CHOICE, without spaces"
        return (
            f"{word}: cannot be read; write text with signs or letters such as ä in quotes "
            f"within quotes: \"{key}='{value}'\""
        )
    # Hydra's message may only say that an override failed; OmegaConf's, its cause, says why.
    text = " ".join(f"{error} {error.__cause__ or ''}".split())
    list_in_file = re.match(r"In '(.+)': .*Cannot merge DictConfig with ListConfig", text)
    if list_in_file:
        return f"configs/{list_in_file[1]}.yaml: must hold keys, not a list"
    # Of a group such as model/optimizer, which another file has chosen.
    chosen_twice = re.match(r"Multiple values for .* use 'override (\S+): (.+)'", text)
    if chosen_twice:
        group, choice = chosen_twice.groups()
        return f"+{group}={choice}: {group} has a choice already; leave out the plus"
    # What OmegaConf appends is about its own types.
    text = text.partition(" object_type=")[0]
    return textwrap.shorten(hide_assigned(text), 300)


class Checked(NamedTuple):
    """A configuration without faults, and how it was checked."""

    cfg: DictConfig
    comparison: Comparison


class Variation:
    """A checked configuration in which one value at a time is replaced.

    Composing it takes a tenth of a second, and a grid may have hundreds of values.
    """

    def __init__(self, checked: Checked) -> None:
        self.cfg = checked.cfg
        self.checked = checked
        self.leaves = checked.comparison.written
        # The rule of a key counts for another key's value that it refers to.
        self.references = {}
        # What a resolver makes of a value is only known when it has run.
        self.computed = []
        for key, leaf in self.leaves.items():
            if "${" in str(leaf.text):
                self.references[key] = leaf
            if COMPUTED.search(str(leaf.text)):
                self.computed.append(leaf)
        self.restore: Callable[[], object] = lambda: None

    def replace(self, word: str) -> bool:
        """Let ``cfg`` have this override.

        Returns:
            False if only a composition can tell whether it is valid.
        """
        self.restore()
        (override,) = overrides.parse([word])
        key = override.key_or_group
        is_value = key in self.leaves and key not in self.checked.comparison.groups
        # Other rules may hold with another class or module, and groups of keys are merged.
        if not is_value or SPECIAL.search(word):
            return False
        leaf = self.leaves[key]
        new = leaf._replace(text=override.value())
        set_value = partial(OmegaConf.update, self.cfg, key, force_add=True)
        self.restore = partial(set_value, leaf.text)
        # Whatever is wrong, the composition has the message.
        with suppress(OmegaConfBaseException):
            set_value(new.text)
            for computed in self.computed:
                resolve_or_raise(computed)
            wrong = self.checked.comparison.wrong_values({**self.references, key: new})
            return not [*wrong, *rules.contradictions(self.cfg)]
        return False


def _compose(lines: list[str]) -> Checked:
    """The configuration of one run, or a ConfigError with its faults."""
    groups = choices_of(*config_folders())
    typed = overrides.parse(lines)
    rewritten = [overrides.rewrite(override, groups) for override in typed]
    words = [*rewritten, *search_path_override()]
    cfg = hydra.compose("train", words, return_hydra_config=True)
    _expand_homes(cfg)
    choices = _find_choices(cfg, words, groups)
    reject(_find_missing_choices(choices, groups))
    reference = _compose_reference(choices, groups)
    with open_dict(cfg), open_dict(reference):
        del cfg["hydra"], reference["choices"]
        # The check writes this key, at the end. Any other value is an unknown key of the user's.
        if cfg.get("choices") == {}:
            del cfg["choices"]

    added = [one.key_or_group for one in typed if str(one.input_line).startswith("+")]
    comparison = Comparison(cfg, reference, groups)
    faults = comparison.faults(added)
    if faults:
        keys = _typed_keys(typed, rewritten)
        reject(_name_files(faults, keys, find_origins(choices, groups)))
    reject(rules.contradictions(cfg))

    with open_dict(cfg):
        cfg.choices = choices
    # Raises if an interpolation in a file has no value. `compare` looks at changed values only.
    OmegaConf.to_container(cfg, resolve=True)
    return Checked(cfg, comparison)


def _expand_homes(cfg: DictConfig) -> None:
    """Replace a leading ``~/`` of every text by the home directory.

    Any key may be a path, also one of the user's own, and what reads it would make a folder ``~``.
    """
    for key, leaf in flatten(cfg).items():
        # A list may hold paths too.
        expanded = map_values(leaf.text, str, partial(_expand_home, key))
        if expanded != leaf.text:
            leaf.node[leaf.name] = expanded


def _expand_home(key: str, text: str) -> str:
    """A text with the home directory in its place, if it begins as a path in one does."""
    is_in_home = re.match(r"~[\w.-]*/", text)
    return environment.expand_home(text, key) if is_in_home else text


def _typed_keys(typed: Sequence[Override], rewritten: Sequence[str]) -> list[str]:
    """The keys whose values come from the command line. A choice of a file sets no key itself."""
    keys = []
    for override, line in zip(typed, rewritten, strict=True):
        if line.startswith(("++", "~")):
            keys.append(override.key_or_group)
    return keys


def _name_files(
    faults: Sequence[Fault], typed: Sequence[str], files: Mapping[str, str]
) -> Iterator[str]:
    """The lines of the faults, each with the file that set the key, unless it was typed."""
    for key, line in faults:
        # An override of a node above sets the key too, and one below may have made a wrong node.
        is_typed = any(is_below(key, [word]) or is_below(word, [key]) for word in typed)
        if key in files and not is_typed:
            yield f"{line} ({files[key]})"
        else:
            yield line


def _find_missing_choices(
    choices: Mapping[str, Any], groups: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """A line for each group of which a run needs a file, and has none."""
    for group, others in NEEDED.items():
        if choices.get(group) not in [*groups[group], *others]:
            yield f"{group}: a run needs one of {', '.join(groups[group])}"


def _find_choices(
    cfg: DictConfig, words: list[str], groups: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """The chosen file of each group; a list if several were chosen."""
    choices: dict[str, Any] = {}
    for group, name in cfg.hydra.runtime.choices.items():
        if group in groups:
            choices[group] = name
    lists: dict[str, list[str]] = {}
    for group in (*NEEDED, *OPTIONAL):
        if group not in choices:
            lists[group] = []
    if not lists:
        return choices
    # Hydra does not record the choices of a list, such as callbacks=[early_stopping,ema].
    loader = GlobalHydra.instance().config_loader()
    files = loader.compute_defaults_list("train", words, RunMode.RUN).defaults
    for file in files:
        group, _, name = file.config_path.rpartition("/")
        # A file that another file of the group includes was not chosen itself.
        is_included = str(file.parent).startswith(f"{group}/")
        if group in lists and not is_included:
            lists[group].append(name)
    return choices | lists


def _compose_reference(choices: Mapping[str, Any], groups: Container[str]) -> DictConfig:
    """The same chosen files, without overrides of values and without overlays."""
    lines = search_path_override()
    lines += [f"{group}=[]" for group in OVERLAYS if group in groups]
    for group, choice in choices.items():
        if group not in OVERLAYS:
            lines.append(f"{group}={_typed_choice(choice)}")
    try:
        return hydra.compose("train", lines)
    except ConfigCompositionException:
        # A group that is not in a defaults list, such as +model/head=linear, needs its plus. Hydra
        # does not record the plus, so ask which of the groups are known without it.
        top = [line for line in lines if not _is_nested(line)]
        known = hydra.compose("train", top, return_hydra_config=True).hydra.runtime.choices
        return hydra.compose("train", [_with_plus(line, known) for line in lines])


def _typed_choice(choice: str | list[str] | None) -> str:
    """The choice of a group as it is typed."""
    if isinstance(choice, str):
        return choice
    # A default such as `- model/head: null` chooses nothing, which Hydra reads as an empty list.
    return f"[{','.join(choice or [])}]"


def _is_nested(line: str) -> bool:
    return "/" in line.partition("=")[0]


def _with_plus(line: str, known: Container[str]) -> str:
    is_added = _is_nested(line) and line.partition("=")[0] not in known
    return f"+{line}" if is_added else line


def reject(faults: Iterable[str]) -> None:
    """Raise a ConfigError with these lines, each once, if there are any."""
    message = "\n".join(dict.fromkeys(faults))
    if message:
        raise ConfigError(message)
