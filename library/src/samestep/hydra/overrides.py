"""The overrides of the command line, as typed and as Hydra gets them. Imports no torch."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from samestep.errors import ConfigError
from samestep.hydra.project import (
    NOT_GROUPS,
    choices_of,
    config_folders,
    default_groups,
    search_path_override,
)
from samestep.hydra.suggestions import no_such_choice
from samestep.ranks.secrets import hide_assigned


def parse(lines: Sequence[str]) -> list[Override]:
    """The overrides of one run."""
    return OverridesParser.create().parse_overrides(list(lines))


def rewrite_overrides(lines: Sequence[str]) -> list[str]:
    """The overrides as ``compose.check`` passes them to Hydra; ``hydra.main`` must get the same."""
    groups = choices_of(*config_folders())
    rewritten = [rewrite(override, groups) for override in parse(lines)]
    return [*rewritten, *search_path_override()]


def rewrite(override: Override, groups: Mapping[str, Sequence[str]]) -> str:
    """One override as Hydra gets it: a value as ``++key=value``, however the user typed it.

    Choices of files, deletions and Hydra's own keys stay as typed.
    """
    line, group = str(override.input_line), override.key_or_group
    if override.is_delete() or override.is_hydra_override():
        return line
    if not group:
        raise ConfigError(f"{line}: has no key; write KEY=VALUE or GROUP=CHOICE")
    if group in NOT_GROUPS:
        raise ConfigError(f"{line}: is for another command, samestep {group} {line} ...")
    # A sweep has no single value yet. It is checked run by run.
    value = "" if override.is_sweep_override() else override.value()
    if group not in groups or isinstance(value, dict):
        # With ++ Hydra accepts keys that no file has. Its own error has no suggestion; `schema`
        # finds them later and says which key was probably meant.
        return "++" + line.lstrip("+")
    return _rewrite_choice(line, group, value, groups[group])


def _rewrite_choice(line: str, group: str, value: Any, choices: Sequence[str]) -> str:
    """The choice of a file as Hydra gets it."""
    if value is None:
        # Hydra rejects logger=null, but an empty list means the same.
        return f"{group}=[]"
    if not isinstance(value, str | list):
        raise ConfigError(no_such_choice(group, value, choices))
    choice = line.lstrip("+")
    # Hydra takes the plus for a second choice of a group that has one already, and knows no `++`
    # for groups. For keys each of them may be typed, so it may here.
    if group in default_groups() or choice == line:
        return choice
    return f"+{choice}"


def list_options(lines: Sequence[str], *, multirun: bool) -> list[list[str]]:
    """For each override the overrides to check: one, or with ``multirun`` one for each value."""
    return [_options_of(override, multirun) for override in _parse_sweep(lines)]


def _parse_sweep(lines: Sequence[str]) -> list[Override]:
    # The loader finds the choices of a sweep such as data=glob(mnist*).
    loader = GlobalHydra.instance().config_loader()
    return OverridesParser.create(loader).parse_overrides(list(lines))


def _options_of(override: Override, multirun: bool) -> list[str]:
    """The overrides to check for this one."""
    if is_varied(override) and not multirun:
        raise ConfigError(
            f"{hide_assigned(str(override.input_line))}: is several values; put -m before it to "
            "run one after the other, [ ] around a list, or quotes within quotes around text"
        )
    values = _values_of(override)
    if override.is_range_sweep():
        # A range may have thousands of values, and a rule for a number has a lowest and a highest.
        return [values[0], values[-1]]
    return values


def is_varied(override: Override) -> bool:
    """Whether an override has several values, each for a run of its own."""
    return override.is_sweep_override() and not override.is_hydra_override()


def _values_of(override: Override) -> list[str]:
    """One override for each value that a sweep has for this key; otherwise the override itself."""
    if not is_varied(override):
        return [str(override.input_line)]
    key = override.get_key_element()
    values = list(override.sweep_string_iterator()) or [""]
    return [f"{key}={value}" for value in values]


class GridRun(NamedTuple):
    """One run of a grid."""

    overrides: list[str]
    fixed: list[str]
    """Those of all runs."""
    values: dict[str, str]
    """Of the keys that have several values."""
    blank: tuple[str, ...]
    """The overrides, with ``???`` for each of these values.

    Choices of files stay, and groups of keys, which Hydra merges into those of a file.
    """


def list_grid(lines: Sequence[str]) -> list[GridRun]:
    """Every run of a grid: each combination of the values that its keys have."""
    groups = choices_of(*config_folders())
    typed = _parse_sweep(lines)
    fixed = [str(override.input_line) for override in typed if not is_varied(override)]
    runs = []
    for words in itertools.product(*map(_values_of, typed)):
        values = {}
        blank = [*words]
        for index, override in enumerate(typed):
            if not is_varied(override):
                continue
            name = override.key_or_group
            key, _, values[name] = words[index].partition("=")
            if name not in groups and not values[name].startswith("{"):
                blank[index] = f"{key}=???"
        runs.append(GridRun([*words], fixed, values, tuple(blank)))
    return runs
