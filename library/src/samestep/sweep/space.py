"""The search space: which keys of the configuration are tried with which values."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from optuna.trial import Trial

from samestep.errors import ConfigError
from samestep.hydra.rules import ABOVE_0, BOOL, Rule, number, one_of, whole
from samestep.hydra.schema import nearest, show
from samestep.launch.local_settings import write

TYPES = ("float", "int", "choice")
NUMBER = number("a finite number", lambda v: True)
CHOICES = Rule("a list of at least one value", lambda v: isinstance(v, list) and bool(v))
FIELDS: dict[str, dict[str, Rule]] = {
    "float": {"low": NUMBER, "high": NUMBER, "log": BOOL, "step": ABOVE_0},
    "int": {"low": whole(-(2**53)), "high": whole(-(2**53)), "log": BOOL, "step": whole(1)},
    "choice": {"choices": CHOICES},
}
NOT_SEARCHED = {
    "run_id": "each trial has its own",
    "run_root": "the search chooses it",
    "run_dir": "the search chooses it",
    "cluster": "all trials run in one place",
    "callbacks.best": "all trials are compared by one metric",
    "callbacks.artifacts": "all trials are copied to one place",
}
WORD = re.compile(r"(?!(true|false|null|nan|inf)$)[A-Za-z][\w./-]*", re.IGNORECASE)


class Parameter(NamedTuple):
    """A key of the configuration, and the values that are tried."""

    key: str
    kind: str
    """One of TYPES."""
    low: float = 0
    high: float = 0
    log: bool = False
    step: float | None = None
    choices: tuple[Any, ...] = ()

    def suggest(self, trial: Trial) -> Any:
        """The value of this trial: the one that it has already, otherwise one from the sampler."""
        if self.kind == "choice":
            return trial.suggest_categorical(self.key, list(map(to_optuna, self.choices)))
        if self.kind == "int":
            low, high, step = int(self.low), int(self.high), int(self.step or 1)
            return trial.suggest_int(self.key, low, high, log=self.log, step=step)
        return trial.suggest_float(self.key, self.low, self.high, log=self.log, step=self.step)

    def override(self, value: Any) -> str:
        """What a run gets for a value of ``suggest``, such as ``model.optimizer.lr=0.003``."""
        chosen = [choice for choice in self.choices if to_optuna(choice) == value]
        return f"{self.key}={write_value(chosen[0] if chosen else value)}"

    def ends(self) -> list[str]:
        """The values to check before a run begins: all choices, or both ends of a range."""
        return [write_value(value) for value in self.choices or (self.low, self.high)]


def to_optuna(value: Any) -> Any:
    """A choice as Optuna keeps it: lists and groups of keys become text."""
    return write(value) if isinstance(value, (list, dict)) else value


def write_value(value: Any) -> str:
    """Write a value as a person would type it in an override."""
    is_word = isinstance(value, str) and WORD.fullmatch(value)
    return str(value) if is_word else write(value)


def parse(nodes: Any, source: str) -> list[Parameter]:
    """The parameters of the key ``space`` of a file.

    Args:
        nodes: what the file has there, in plain containers.
        source: the file, for messages.

    Raises:
        ConfigError: naming all mistakes, one line each.
    """
    if not isinstance(nodes, dict) or not nodes:
        raise ConfigError(f"{source}: space must have the keys that are tried, at least one")
    faults = [f"{source}: {fault}" for key in nodes for fault in find_faults(str(key), nodes[key])]
    if faults:
        raise ConfigError("\n".join(faults))
    parameters = []
    for key, node in nodes.items():
        fields = {name: value for name, value in node.items() if name != "type"}
        if "choices" in fields:
            fields["choices"] = tuple(fields["choices"])
        parameters.append(Parameter(str(key), node["type"], **fields))
    return parameters


def find_faults(key: str, node: Any) -> list[str]:
    """What is wrong with one parameter, one line for each mistake."""
    for other, reason in NOT_SEARCHED.items():
        if f"{key}.".startswith(f"{other}."):
            return [f"space.{key}: cannot be searched, {reason}"]
    if not isinstance(node, dict):
        return [f"space.{key}={show(node)}: must be a group of keys, such as {{type: float, ...}}"]
    kind = node.get("type")
    if kind not in TYPES:
        near = nearest(str(kind), TYPES)
        hint = f"; did you mean {near}?" if near else ""
        return [f"space.{key}.type={show(kind)}: must be {one_of(*TYPES).text}{hint}"]
    return find_wrong_fields(key, node, FIELDS[kind]) or find_wrong_range(key, node)


def find_wrong_fields(key: str, node: Mapping[str, Any], rules: Mapping[str, Rule]) -> list[str]:
    """Unknown fields, missing fields, and values that a field cannot have."""
    faults = []
    for name, value in node.items():
        if name == "type":
            continue
        if name not in rules:
            faults.append(f"space.{key}.{name}: no such key; there is type, {', '.join(rules)}")
        elif not rules[name].holds(value):
            faults.append(f"space.{key}.{name}={show(value)}: must be {rules[name].text}")
    needed = [name for name in rules if name in ("low", "high", "choices")]
    missing = [f"space.{key}.{name} is not set" for name in needed if name not in node]
    return faults + missing


def find_wrong_range(key: str, node: Mapping[str, Any]) -> list[str]:
    """What is wrong with ``low``, ``high``, ``log`` and ``step`` together."""
    if "choices" in node:
        texts = [write(choice) for choice in node["choices"]]
        return [f"space.{key}.choices: {t} is there twice" for t in texts if texts.count(t) > 1][:1]
    low, high, step = node["low"], node["high"], node.get("step")
    if low >= high:
        return [f"space.{key}: low={low} must be below high={high}"]
    if node.get("log") and low <= 0:
        return [f"space.{key}: low={low} must be above 0, because log is true"]
    if node.get("log") and step:
        return [f"space.{key}: log and step exclude each other"]
    if step and step > high - low:
        return [f"space.{key}: step={step} must be at most high - low, {high - low:g}"]
    return []


def to_grid(parameters: Sequence[Parameter]) -> list[str]:
    """Overrides of a grid with all values that are checked before the first trial."""
    return [f"{parameter.key}={','.join(parameter.ends())}" for parameter in parameters]
