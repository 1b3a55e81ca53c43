"""The rules of the user's own keys, from the modules that ``rules:`` in train.yaml names."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from omegaconf import DictConfig

from samestep.errors import ConfigError
from samestep.hydra.nodes import as_list
from samestep.rules import Rule


class ProjectRules(NamedTuple):
    """The rules of the user's own keys."""

    rules: Mapping[str, Rule]
    contradictions: Callable[[DictConfig], Iterable[str]]
    """A line for each conflict between values."""
    may_change: Sequence[str]
    """Patterns of keys that do not change what is learned; see ``samestep.config_keys``."""
    targets: tuple[str, ...]
    """Prefixes of the ``_target_`` of the user's own code, such as ``project.``."""
    needed_files: Callable[[DictConfig], Sequence[str]]
    """Files that must exist before a run starts, because it does not download them."""


NAMES_OF_RULES = ("RULES", "contradictions", "MAY_CHANGE", "needed_files")
"""What a module with rules may define. It must define at least one of these."""


def load_project_rules(names: str | Sequence[str] | None) -> ProjectRules:
    """The joined rules of these modules; without any, no rules."""
    listed = as_list(names)
    # Read before anything else is checked: the rules say what the other keys may be.
    if not isinstance(listed, Sequence) or not all(isinstance(name, str) for name in listed):
        raise ConfigError(f"rules={names}: must be a list of names of modules, or null")
    modules = [_import_rules(name) for name in listed]
    rules: dict[str, Rule] = {}
    may_change: list[str] = []
    targets: list[str] = []
    for module in modules:
        rules |= getattr(module, "RULES", {})
        may_change += getattr(module, "MAY_CHANGE", [])
        targets.append(f"{module.__name__.partition('.')[0]}.")

    # The functions are looked up when they are called: a module may lack any of them.
    def call_all(name: str, *arguments: Any) -> Iterator[str]:
        for module in modules:
            if hasattr(module, name):
                yield from getattr(module, name)(*arguments)

    return ProjectRules(
        rules=rules,
        contradictions=lambda cfg: call_all("contradictions", cfg),
        may_change=may_change,
        targets=tuple(targets),
        needed_files=lambda cfg: [*call_all("needed_files", cfg)],
    )


def _import_rules(name: str) -> ModuleType:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"rules={name}: {error}; it must be a module, such as project.rules"
        ) from error
    # A wrong module, such as project.train, would otherwise just have no rules.
    if not any(hasattr(module, known) for known in NAMES_OF_RULES):
        raise ConfigError(f"rules={name}: must define one of {', '.join(NAMES_OF_RULES)}")
    return module
