"""A configuration compared with the one it should resemble, its *reference*. Imports no torch."""

import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from samestep.config.rules import QUOTED, RULES

LAID_OVER = ("experiment", "debug", "local")  # groups that change values and bring no own keys
SHARED = (  # parts of others, not to be chosen
    "data/default", "model/default", "cluster/common", "cluster/pods", "cluster/kubernetes"
)  # fmt: skip
# Targets whose keys are all listed in configs/.
OURS = ("project.", "samestep.", "lightning.Trainer")
COLLECTIONS = ("callbacks", "logger")  # nodes of nodes, to which a run may add its own
TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: QUOTED,
    list: "a list of the same kind as its default",
    dict: "a group of keys",
}


@dataclass
class Schema:
    """What a configuration may be.

    Nodes with a ``_target_`` of another project are *open*: keys may be added to them and removed,
    and ``samestep.build`` compares these with the signature. So are those with a new ``_target_``.

    Args:
        reference: every key there is, each with a value of the right type.
        choices: the files of each group.
    """

    reference: DictConfig
    choices: dict[str, list[str]]

    def faults(
        self, cfg: DictConfig, reference: DictConfig, prefix: str = "", is_open: bool = False
    ) -> Iterator[tuple[str, str]]:
        """What is wrong with ``cfg``: pairs of a full key and a line that names key and value."""
        target = str(cfg.get("_target_") or "")
        if target and target != reference.get("_target_"):  # the keys are those of another thing
            reference, is_open = OmegaConf.create(), True
        is_open = is_open or (target != "" and not target.startswith(OURS))
        is_collection = prefix[:-1] in COLLECTIONS
        written, defaults = plain(cfg), plain(reference)
        if not is_open and not is_collection:
            for name in defaults.keys() - written.keys():
                yield f"{prefix}{name}", f"~{prefix}{name}: a run needs this key"
        for name, text in written.items():
            key, default = f"{prefix}{name}", defaults.get(name)
            is_new_node = is_collection and isinstance(text, dict) and "_target_" in text
            if name not in defaults and not is_open and not is_new_node:
                for leaf, value in leaves(text, key).items():
                    line = f"{leaf}={show(value)}: no such key; "
                    yield leaf, line + self._near(leaf, value, prefix[:-1], list(defaults))
            elif isinstance(text, dict) and isinstance(default, dict):
                yield from self.faults(cfg[name], reference[name], f"{key}.", is_open)
            elif "${" not in str(text) or text != default:  # not just another key's value
                value, like = _value(cfg, name), _value(reference, name)
                if isinstance(value, MissingMandatoryValue):
                    yield key, f"{key} is not set: add {key}=VALUE"
                elif isinstance(value, OmegaConfBaseException):
                    why = str(value).splitlines()[0].rpartition("interpolation: ")[2]
                    yield key, f"{key}={show(text)}: {why}"
                elif must := self._must_be(key, value, like, is_open):
                    yield key, f"{key}={show(text)}: must be {must}"

    def _must_be(self, key: str, value: Any, default: Any, is_open: bool) -> str:
        """What the value of ``key`` should be; nothing if it is that."""
        for patterns, rule in RULES.items():
            if any(fnmatchcase(key, pattern) for pattern in patterns.split()):
                near = nearest(str(value), rule.choices)
                hint = f"; did you mean {key}={near}?" if near else ""
                return "" if rule.holds(value) else rule.text + hint
        if _is_like(value, default) or (is_open and value is None):
            return ""
        group = key.replace(".", "/")
        hint = f"; a file is chosen by {group}=NAME" if group in self.choices else ""
        return TYPES[type(default)] + hint

    def _near(self, key: str, value: object, parent: str, names: list[str]) -> str:
        """What was probably meant by ``key``, which ``parent`` does not have."""
        if key.split(".")[0] in LAID_OVER:
            return "its file must begin with # @package _global_"
        keys = [known for known in leaves(plain(self.reference)) if "._" not in known]
        if near := nearest(key, [*keys, *self.choices]):
            return f"did you mean {near}={show(value)}?"
        there = ", ".join(name for name in names if not name.startswith("_"))
        return f"{parent or 'train.yaml'} has {textwrap.shorten(there, 200, placeholder=' ...')}"


def no_such_choice(group: str, choice: object, choices: Sequence[str]) -> str:
    """What to say when the ``group`` holds no such file."""
    near = nearest(str(choice), choices)
    hint = f"did you mean {group}={near}? " if near else ""
    return f"{group}={show(choice)}: no such choice; {hint}there is {', '.join(choices) or 'none'}"


def choices_of(configs: Path) -> dict[str, list[str]]:
    """The groups, and the files that may be chosen in each."""
    groups = {}
    for folder in sorted(path for path in configs.rglob("*") if path.is_dir()):
        group = folder.relative_to(configs).as_posix()
        names = sorted(file.stem for file in folder.glob("*.yaml"))
        groups[group] = [name for name in names if f"{group}/{name}" not in SHARED]
    return groups


def plain(node: DictConfig) -> dict[str, Any]:
    """The node as it is written, interpolations as text."""
    content = OmegaConf.to_container(node)
    assert isinstance(content, dict)
    return {str(name): value for name, value in content.items()}


def leaves(value: Any, key: str = "") -> dict[str, Any]:
    """The values below ``key`` that hold no further keys, by their full keys."""
    if not isinstance(value, dict) or not value:
        return {key: value}
    prefix = f"{key}." if key else ""
    return {k: v for name in value for k, v in leaves(value[name], f"{prefix}{name}").items()}


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word or key that was probably meant; the last part of a key counts as much."""

    def alike(key: str) -> float:
        last, key_last = (re.split("[./]", text)[-1] for text in (word, key))
        whole = SequenceMatcher(None, word, key).ratio()
        return (last == key_last) + (whole + SequenceMatcher(None, last, key_last).ratio()) / 2

    best = max(known, key=alike, default="")
    return best if alike(best) >= 0.6 else None


def show(value: object) -> str:
    """The value as it is typed in an override."""
    return value if isinstance(value, str) else json.dumps(value)


def _value(node: DictConfig, name: str) -> Any:
    """The value as a run gets it, or the error that this raises."""
    try:
        value = node[name]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        return error


def _is_like(value: Any, default: Any) -> bool:
    """Whether ``value`` is of the type of ``default``; anything is like null or an error."""
    if default is None or isinstance(default, Exception):
        return True
    if isinstance(default, float):
        return type(value) in (int, float) and math.isfinite(value)
    if isinstance(default, list) and isinstance(value, list):
        return not default or all(_is_like(item, default[0]) for item in value)
    return type(value) is type(default)
