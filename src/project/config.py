"""The command line and configs/, composed and checked before anything runs. Imports no torch.

The YAML files are the schema. A run is compared with its *reference*: the same group choices without
what is laid over them, which are overrides and the groups experiment, debug and local. There must
be no key that the reference lacks, and every value must be of the type it has there. Only what a
default cannot say has a line elsewhere, in ``project.rules``.

Nodes with a ``_target_`` outside this project are *open*: keys may be added to and removed from
them, and ``project.build`` compares them with the constructor's signature.
"""

import argparse
import itertools
import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from project.rules import RULES, contradictions

CONFIGS = Path(__file__).parents[2] / "configs"
OVERLAYS = ("experiment", "debug", "local")  # groups that may only change keys, not bring their own
COLLECTIONS = ("callbacks", "logger")  # groups of nodes, to which a run may add its own
MAX_ERRORS = 5
MAX_PRODUCT = 16  # combinations of a sweep up to which all are checked
TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text; quote a number twice, as in \"key='1'\"",
    list: "a list, as in [1,2]",
    dict: "a group of keys",
}


class ConfigError(ValueError):
    """What the user typed or wrote cannot be run: one message, exit code 2."""


def flags_of(argv: Sequence[str]) -> argparse.Namespace:
    """Hydra's flags (``help``, ``cfg``, ``multirun``, ...) and ``overrides`` of a command line.

    Raises:
        ConfigError: a flag does not exist, stands behind an override, or contradicts another one.
    """

    def refuse(message: str) -> None:
        raise ConfigError(f"{message}; python train.py --hydra-help lists the flags")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[assignment, method-assign]  # not usage and an exit
    flags, unknown = parser.parse_known_args(argv)
    for word in unknown:
        if not word.startswith("-"):
            refuse(f"{word}: flags such as -m go before all overrides, or after them")
        if "=" in word:
            refuse(f"{word}: overrides have no dashes; did you mean {word.lstrip('-')}?")
        refuse(f"{word}: there is no such flag")
    for name in ("config_path", "config_name", "config_dir", "experimental_rerun"):
        if getattr(flags, name) is not None:
            refuse(f"--{name.replace('_', '-')}: is not supported: configs/ is what is checked")
    commands = (flags.run, flags.multirun, flags.cfg, flags.info, flags.shell_completion)
    if sum(map(bool, commands)) > 1:
        refuse("--run, --multirun, --cfg, --info and --shell-completion exclude each other")
    if flags.resolve and not (flags.cfg or flags.help):
        refuse("--resolve: goes with --cfg, as in --cfg job --resolve")
    return flags


def overrides_of(argv: Sequence[str]) -> list[str]:
    """The overrides of a command line, without Hydra's flags."""
    return list(flags_of(argv).overrides)


def check(
    overrides: Sequence[str], *, multirun: bool = False, configs: Path = CONFIGS
) -> DictConfig:
    """Compose ``train.yaml`` with these overrides, and check it.

    Args:
        overrides: as typed, such as ``["model=mlp", "seed=1"]``.
        multirun: accept sweeps such as ``seed=1,2``, and check each combination. Of sweeps with
            more than 16 of them, each value is checked together with the first of the others; of
            a range, the first and the last number.
        configs: directory of ``train.yaml``.

    Returns:
        The configuration, not yet resolved; that of the first combination in a sweep.

    Raises:
        ConfigError: naming up to five faults, one line each.
    """
    if not (configs / "train.yaml").is_file():
        raise ConfigError(f"{configs}/train.yaml is missing: run from a clone of the repository")
    with hydra.initialize_config_dir(str(configs.absolute()), version_base="1.3"):
        checked = [_Run(line, configs).check() for line in _combinations(overrides, multirun)]
    return checked[0]


def _combinations(overrides: Sequence[str], multirun: bool) -> list[list[str]]:
    """The overrides of each run: one, or those of a sweep."""
    options = []
    for override in _parse(overrides):
        values = [str(override.input_line)]
        if override.is_sweep_override() and not override.is_hydra_override():
            if not multirun:
                raise ConfigError(
                    f"{values[0]}: is several values; put -m before it to run one after the other, "
                    "or [ ] around a list, or quotes within quotes around text"
                )
            if not override.is_discrete_sweep():
                raise ConfigError(f"{values[0]}: use choice(a,b) or range(1,4)")
            values = [f"{override.get_key_element()}={v}" for v in override.sweep_string_iterator()]
            if not values:
                raise ConfigError(f"{override.input_line}: holds no value")
            if override.is_range_sweep():
                values = [values[0], values[-1]]
        options.append(values)
    if math.prod(map(len, options)) <= MAX_PRODUCT:
        return [list(combination) for combination in itertools.product(*options)]
    first = [values[0] for values in options]
    return [
        [*first[:index], value, *first[index + 1 :]]
        for index, values in enumerate(options)
        for value in values
    ]


def _parse(overrides: Sequence[str]) -> list[Override]:
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    parsed = []
    for line in overrides:
        try:
            parsed += parser.parse_overrides([line])
        except HydraException:
            how = "quote special characters twice, as in \"data.root='~/my data'\""
            if "=" not in line:
                how = "overrides are written key=value, without spaces"
            raise ConfigError(f"{line}: cannot be read; {how}") from None
    return parsed


class _Run:
    """One combination of overrides, composed in steps; each step relies on the one before."""

    def __init__(self, overrides: list[str], configs: Path) -> None:
        self.lines, self.configs = overrides, configs
        self.overrides = [o for o in _parse(overrides) if not o.is_hydra_override()]
        self.choices: dict[str, list[str]] = {}  # of each group
        for path in sorted(configs.rglob("*.yaml")):
            group = path.parent.relative_to(configs).as_posix()
            self.choices.setdefault(group, []).append(path.stem)
        del self.choices["."]

    def check(self) -> DictConfig:
        """Compose the configuration, or raise a ConfigError with its faults."""
        _raise(self._wrong_choices())
        try:
            self.files = list(self._load())
            self.reference = _merge(
                node for path, node in self.files if path.split("/")[0] not in OVERLAYS
            )
            _raise(self._wrong_keys(_merge(node for _, node in self.files)))
            cfg = hydra.compose("train", self.lines)
            _raise(self._faults(cfg, self.reference))
        except ConfigError:
            raise
        except MissingConfigException as error:
            group, _, choice = str(error.missing_cfg_file).rpartition("/")
            raise ConfigError(self._no_choice(group, choice)) from None
        except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
            message = " ".join(f"{error} {error.__cause__ or ''}".split())
            raise ConfigError(textwrap.shorten(message, 300)) from None
        _raise(contradictions(cfg))
        return cfg

    def _wrong_choices(self) -> Iterator[str]:
        """Overrides that choose a file which is not there, or none where a run needs one."""
        for override in self.overrides:
            group, value, line = override.key_or_group, override.value(), override.input_line
            if group not in self.choices or isinstance(value, dict):
                continue
            if override.is_add() or override.is_force_add():
                yield f"{line}: a group of train.yaml is chosen without +"
            elif group not in OVERLAYS and (override.is_delete() or value == []):
                yield f"{line}: a run needs one of {group}={'|'.join(self.choices[group])}"
            elif not override.is_delete():
                for choice in value if isinstance(value, list) else [value]:
                    if not (self.configs / group / f"{choice}.yaml").is_file():
                        yield self._no_choice(group, choice)

    def _no_choice(self, group: str, choice: object) -> str:
        choices = self.choices.get(group, [])
        near = _nearest(str(choice), choices)
        hint = f"did you mean {group}={near}?" if near else "there is"
        if choice is None:
            hint = f"leave it out, or write ~{group}; there is"
        return f"{group}={_show(choice)}: no such choice; {hint} {', '.join(choices) or 'none'}"

    def _load(self) -> Iterator[tuple[str, DictConfig]]:
        """The YAML files that make up this run: path below configs/, and content in its place."""
        loader = GlobalHydra.instance().config_loader()
        for part in loader.compute_defaults_list("train", self.lines, RunMode.RUN).defaults:
            path = f"{part.config_path}.yaml"
            if not path.startswith("hydra/") and (self.configs / path).is_file():
                content, node = OmegaConf.load(self.configs / path), OmegaConf.create()
                for name in ("defaults", "hydra"):
                    content.pop(name, None)
                OmegaConf.update(node, part.package, content, merge=False)
                yield path, (node if part.package else content)

    def _wrong_keys(self, files: DictConfig) -> Iterator[str]:
        """Overrides of keys that are not there, and additions of keys that are."""
