"""The command line and configs/, composed and checked before anything runs. Imports no torch.

The YAML files are the schema: a run is compared with the same choice of files without what is laid
over them, which are the overrides and the groups experiment, debug and local. A key must be there
too, and its value be of the type it has there. What a default cannot say is in ``project.rules``.
"""

import argparse
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from project.rules import contradictions
from project.schema import LAID_OVER, Schema, choices_of, is_foreign, leaves, merge, plain, show

CONFIGS = Path(__file__).parents[2] / "configs"
MAX_LINES = 5  # of one message


class ConfigError(ValueError):
    """What the user typed or wrote cannot be run: one message, exit code 2."""


def flags_of(argv: Sequence[str]) -> argparse.Namespace:
    """Hydra's flags (``help``, ``cfg``, ``multirun``, ...) and the ``overrides`` in ``argv``.

    Raises:
        ConfigError: a flag does not exist, stands between overrides, or contradicts another.
    """

    def refuse(message: str) -> None:
        raise ConfigError(f"{message}; python train.py --hydra-help lists all flags")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[assignment, method-assign]  # instead of exiting
    flags, unknown = parser.parse_known_args(argv)
    for word in unknown:
        if not word.startswith("-"):
            refuse(f"{word}: flags such as -m go before the first override or after the last")
        if "=" in word:
            refuse(f"{word}: overrides have no dashes, did you mean {word.lstrip('-')}?")
        refuse(f"{word}: there is no such flag")
    for name in ("config_path", "config_name", "config_dir", "experimental_rerun"):
        if getattr(flags, name) is not None:
            refuse(f"--{name.replace('_', '-')}: a run is made of configs/train.yaml only")
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
        ConfigError: naming up to five faults, one line each.
    """
    if not (configs / "train.yaml").is_file():
        raise ConfigError(f"{configs}/train.yaml is missing: run from a clone of the repository")
    with hydra.initialize_config_dir(str(configs.absolute()), version_base="1.3"):
        first, *_ = [_Composition(run, configs).check() for run in _runs(overrides, multirun)]
    return first


def _runs(overrides: Sequence[str], multirun: bool) -> list[list[str]]:
    """The overrides of one run; in a sweep, of each run that is checked."""
    options: list[list[str]] = []
    for override in _parse(overrides):
        line = str(override.input_line)
        if not override.is_sweep_override() or override.is_hydra_override():
            options.append([line])
        elif not multirun:
            raise ConfigError(
                f"{line}: is several values; put -m before it to run one after the other, "
                "[ ] around a list, or quotes within quotes around text"
            )
        elif not override.is_discrete_sweep():
            raise ConfigError(f"{line}: cannot be counted; use choice(a,b) or range(1,4)")
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


def _parse(overrides: Sequence[str]) -> list[Override]:
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    parsed = []
    for line in overrides:
        try:
            parsed += parser.parse_overrides([line])
        except HydraException:
            how = "quote special characters twice, as in \"data.root='~/my data'\""
            if "=" not in line:
                how = "overrides are written key=value, without spaces around ="
            raise ConfigError(f"{line}: cannot be read; {how}") from None
    return parsed


class _Composition:
    """One run's overrides and files, composed and checked step by step."""

    def __init__(self, lines: list[str], configs: Path) -> None:
        self.lines, self.configs = lines, configs
        self.overrides = [o for o in _parse(lines) if not o.is_hydra_override()]
        self.schema = Schema(OmegaConf.create(), choices_of(configs))

    def check(self) -> DictConfig:
        """The composed configuration, or a ConfigError with its faults."""
        _refuse(self._wrong_choices())
        try:
            files = list(self._load())
            below = [node for path, node in files if path.split("/")[0] not in LAID_OVER]
            self.schema.reference = merge(below)
            cfg = merge([node for _, node in files])
            _refuse(self._wrong_keys(cfg))
            OmegaConf.set_struct(cfg, True)
            ConfigLoaderImpl._apply_overrides_to_config(self.assignments, cfg)
            faults = self.schema.faults(cfg)
            _refuse(f"{line}{self._origin(key, files)}" for key, line in faults)
            _refuse(contradictions(cfg))
            if len(self.overrides) < len(self.lines):
                hydra.compose("train", self.lines)  # looks at those of Hydra
        except ConfigError:
            raise
        except MissingConfigException as error:  # chosen by a file
            group, _, choice = str(error.missing_cfg_file).rpartition("/")
            self.schema.choices.setdefault(group, list(error.options or []))
            line, (folder, _, rest) = (
                self.schema.no_such_choice(group, choice),
                group.partition("/"),
            )
            if folder in LAID_OVER and rest:
                line = f"{group}={choice}: no such choice; write - override /{rest}: {choice}"
            raise ConfigError(line) from None
        except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
            text = " ".join(f"{error} {error.__cause__ or ''}".split()).partition(" full_key:")[0]
            raise ConfigError(textwrap.shorten(text, 300)) from None
        return cfg

    def _wrong_choices(self) -> Iterator[str]:
        """Overrides that choose a file which is not there, or none where a run needs one."""
        for override in self.overrides:
            group, value, line = override.key_or_group, override.value(), override.input_line
            if group not in self.schema.choices or isinstance(value, dict):
                continue
            if override.is_add() or override.is_force_add():
                yield f"{line}: files are chosen without +"
            elif group in LAID_OVER and value is None and not override.is_delete():
                yield f"{line}: leave it out, or write ~{group}"
            elif group not in LAID_OVER and (override.is_delete() or value == []):
                yield f"{line}: a run needs one of {', '.join(self.schema.choices[group])}"
            elif not override.is_delete():
                for choice in value if isinstance(value, list) else [value]:
                    folder, _, name = f"{group}/{choice}".rpartition("/")
                    if name not in self.schema.choices.get(folder, []):
                        yield self.schema.no_such_choice(group, choice)

    def _load(self) -> Iterator[tuple[str, DictConfig]]:
        """The YAML files of this run: path below configs/, and content under its full keys."""
        loader = GlobalHydra.instance().config_loader()
        parts = loader.compute_defaults_list("train", self.lines, RunMode.RUN)
        self.assignments = [o for o in parts.config_overrides if not o.is_hydra_override()]
        for part in parts.defaults:
            path = f"{part.config_path}.yaml"
            if path.startswith("hydra/") or not (self.configs / path).is_file():
                continue
            node = OmegaConf.load(self.configs / path)
            if not isinstance(node, DictConfig):
                raise ConfigError(f"{self.configs / path}: must hold keys, not a list")
            content = {k: v for k, v in plain(node).items() if k not in ("defaults", "hydra")}
            for name in reversed(part.package.split(".") if part.package else []):
                content = {name: content}
            yield path, OmegaConf.create(content)

    def _wrong_keys(self, files: DictConfig) -> Iterator[str]:
        """Overrides of keys that are not there, and additions of keys that are."""
        for override in self.assignments:
            key, value, line = override.key_or_group, override.value(), str(override.input_line)
            typed = {key: line}
            if isinstance(value, dict) and isinstance(OmegaConf.select(files, key), DictConfig):
                typed = {leaf: f"{leaf}={show(v)}" for leaf, v in leaves(value, key).items()}
            for leaf, text in typed.items():
                node, name = files, leaf
                while isinstance(node, DictConfig) and name not in node and "." in name:
                    parent, _, name = name.partition(".")  # the name itself may have dots
                    node = node.get(parent)
                keys = node.keys() if isinstance(node, DictConfig) else ()
                is_there = name in keys or isinstance(node, ListConfig)
                if is_there and override.is_add():
                    yield f"{line}: this key is there already; write it without +"
                elif is_there or override.is_add() or override.is_force_add():
                    continue  # what is added is looked at in its place
                elif keys and is_foreign(node):
                    yield f"{line}: no such key; +{line} would pass it to {node._target_}"
                else:
                    yield self.schema.no_such_key(leaf, text)

    def _origin(self, key: str, files: list[tuple[str, DictConfig]]) -> str:
        """The file that sets ``key``, in brackets; nothing if an override does."""
        overridden = [f"{override.key_or_group}." for override in self.assignments]
        if any(f"{key}.".startswith(o) or o.startswith(f"{key}.") for o in overridden):
            return ""
        paths = [path for path, node in files if key in leaves(plain(node))]
        return f" ({self.configs.name}/{paths[-1]})" if paths else ""


def _refuse(faults: Iterable[str]) -> None:
    lines = list(dict.fromkeys(faults))
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = [f"... and {len(lines) - MAX_LINES} more"]
    if lines:
        raise ConfigError("\n".join(lines))
