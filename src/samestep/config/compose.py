"""The command line and configs/, composed and checked before anything runs. Imports no torch.

The YAML files are the schema: a run is compared with the same choice of files without what is laid
over them, which are the overrides and the groups experiment, debug and local. A key must be there
too, and its value be of the type it has there. What a default cannot say is in
``samestep.config.rules``.
"""

import argparse
import textwrap
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from samestep.config.rules import contradictions
from samestep.config.schema import (
    LAID_OVER,
    SHARED,
    Schema,
    choices_of,
    leaves,
    no_such_choice,
    plain,
)
from samestep.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"
NEEDED = ("data", "model", "trainer", "cluster", "callbacks", "logger")  # groups


def flags_of(argv: Sequence[str]) -> argparse.Namespace:
    """Hydra's flags (``help``, ``cfg``, ``multirun``, ...) and the ``overrides`` in ``argv``.

    Raises:
        ConfigError: a flag does not exist, stands between overrides, or contradicts another.
    """

    def refuse(message: str) -> None:
        raise ConfigError(f"{message}; python train.py --hydra-help lists all flags")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[assignment, method-assign]  # instead of exiting
    flags = parser.parse_args(argv)
    if flags.config_path or flags.config_name or flags.config_dir:
        refuse("--config-dir and its like: a run is made of configs/train.yaml only")
    if sum(map(bool, (flags.run, flags.multirun, flags.cfg, flags.info))) > 1:
        refuse("--run, --multirun, --cfg and --info exclude each other")
    if flags.resolve and not (flags.cfg or flags.help):
        refuse("--resolve: only together with --cfg, as in --cfg job --resolve")
    return flags


def help_text() -> str:
    """The help in ``train.yaml``, with all groups and choices; Hydra's own takes a second."""
    groups = [f"  {g:20}{', '.join(names)}" for g, names in choices_of(CONFIGS).items() if names]
    text = str(OmegaConf.load(CONFIGS / "train.yaml").hydra.help.template)
    return text.replace("$APP_CONFIG_GROUPS", "\n".join(groups))


def check(
    overrides: Sequence[str], *, multirun: bool = False, configs: Path = CONFIGS
) -> DictConfig:
    """Compose ``train.yaml`` with these overrides, and check it.

    Args:
        overrides: as typed, such as ``["model=mlp", "seed=1"]``.
        multirun: allow sweeps such as ``seed=1,2``. Each value is checked together with the first
            of every other sweep; of a range, the first and the last.
        configs: directory of ``train.yaml``.

    Returns:
        The configuration, not yet resolved; of a sweep, that of its first run.

    Raises:
        ConfigError: naming the faults, one line each.
    """
    if not (configs / "train.yaml").is_file():
        raise ConfigError(f"{configs}/train.yaml is missing: run from a clone of the repository")
    with hydra.initialize_config_dir(str(configs.absolute()), version_base="1.3"):
        try:
            first, *_ = [_compose(run, configs) for run in _runs(overrides, multirun)]
        except ConfigError:
            raise
        except MissingConfigException as error:
            group, _, choice = str(error.missing_cfg_file).rpartition("/")
            names = choices_of(configs).get(group, error.options or [])
            raise ConfigError(no_such_choice(group, choice, names)) from None
        except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
            text, *_ = " ".join(f"{error} {error.__cause__ or ''}".split()).split(" object_type=")
            raise ConfigError(textwrap.shorten(text, 300)) from None
    return first


def _runs(overrides: Sequence[str], multirun: bool) -> list[list[str]]:
    """The overrides of one run; in a sweep, of each run that is checked."""
    options: list[list[str]] = []
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    for override in parser.parse_overrides(list(overrides)):
        line = str(override.input_line)
        if not override.is_sweep_override() or override.is_hydra_override():
            options.append([line])
        elif not multirun:
            raise ConfigError(
                f"{line}: is several values; put -m before it to run one after the other, "
                "[ ] around a list, or quotes within quotes around text"
            )
        else:
            values = list(override.sweep_string_iterator()) or [""]
            values = [values[0], values[-1]] if override.is_range_sweep() else values
            options.append([f"{override.get_key_element()}={value}" for value in values])
    first = [values[0] for values in options]
    return [first] + [
        [*first[:index], value, *first[index + 1 :]]
        for index, values in enumerate(options)
        for value in values[1:]
    ]


def _compose(lines: list[str], configs: Path) -> DictConfig:
    """The configuration of one run, or a ConfigError with its faults."""
    loader: Any = GlobalHydra.instance().config_loader()
    parsed, repository = loader._parse_overrides_and_create_caching_repo("train", lines)
    parts: Any = create_defaults_list(repository, "train", parsed, True, skip_missing=False)
    assignments = [part for part in parts.config_overrides if not part.is_hydra_override()]
    files = {
        part.config_path: loader._load_single_config(part, repository).config
        for part in parts.defaults
        if not part.config_path.startswith("hydra/")
    }
    for path, node in files.items():
        if not isinstance(node, DictConfig):
            raise ConfigError(f"{configs / path}.yaml: must hold keys, not a list")
        node.pop("hydra", None)
    choices = choices_of(configs)
    chosen = {path.rpartition("/")[0] for path in files if path not in SHARED}
    _refuse(f"{g}: a run needs one of {', '.join(choices[g])}" for g in NEEDED if g not in chosen)
    below = [node for path, node in files.items() if path.split("/")[0] not in LAID_OVER]
    schema, cfg = Schema(OmegaConf.create(), choices), OmegaConf.create()
    schema.reference.merge_with(*below)
    cfg.merge_with(*files.values())

    # First as if each override had a plus, so that the schema sees every key that was typed.
    added = [o if o.is_delete() else replace(o, type=OverrideType.FORCE_ADD) for o in assignments]
    with_added = deepcopy(cfg)
    ConfigLoaderImpl._apply_overrides_to_config(added, with_added)
    faults = schema.faults(with_added, schema.reference)
    _refuse(f"{line}{_origin(key, files, assignments)}" for key, line in faults)
    _refuse(contradictions(with_added))

    OmegaConf.set_struct(cfg, True)
    ConfigLoaderImpl._apply_overrides_to_config(assignments, cfg)
    OmegaConf.to_container(cfg, resolve=True)  # raises where a file's interpolation has no value
    if len(assignments) < len(parts.config_overrides):  # looks at those of Hydra
        hydra.compose("train", lines)
    return cfg


def _origin(key: str, files: dict[str, DictConfig], assignments: list[Override]) -> str:
    """The file that sets ``key``, in brackets; nothing if an override does."""
    overridden = [f"{override.key_or_group}." for override in assignments]
    if any(f"{key}.".startswith(o) or o.startswith(f"{key}.") for o in overridden):
        return ""
    paths = [path for path, node in files.items() if key in leaves(plain(node))]
    return f" (configs/{paths[-1]}.yaml)" if paths else ""


def _refuse(faults: Iterable[str]) -> None:
    """Raise a ConfigError with these lines, if there are any."""
    if message := "\n".join(faults):
        raise ConfigError(message)
