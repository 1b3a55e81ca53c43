"""A configuration compared with the one it should resemble, its *reference*. Imports no torch."""

import json
import math
import re
import textwrap
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from samestep.hydra import rules
from samestep.hydra.rules import STRING, ProjectRules, Rule
from samestep.ranks.secrets import HIDDEN, is_secret_name
from samestep.spec import leaves

LAID_OVER = ("experiment", "debug", "local")  # groups that change values and bring no own keys
SHARED = (  # parts of others, not to be chosen
    "data/default", "model/default", "cluster/common", "cluster/pods", "cluster/kubernetes"
)  # fmt: skip
NO_GROUPS = ("sweep",)  # folders of configs/ whose files are no part of a run: samestep sweep
COLLECTIONS = ("callbacks", "logger")  # nodes of nodes, to which a run may add its own
KEPT = ("samestep.", "lightning.Trainer")  # targets whose keys are all listed in configs/
TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: STRING,
    list: "a list of the same kind as its default",
    dict: "a group of keys",
}
Fault = tuple[str, str]  # a full key, and a line that names the key, its value and the remedy


class Leaf(NamedTuple):
    """A value in a configuration: the node that holds it, its name there, and how it is written.

    ``text`` is the plain value; an interpolation such as ``${seed}`` is not resolved.
    """

    node: DictConfig
    name: str
    text: Any


class Comparison:
    """A configuration compared with its reference.

    Some nodes are open: ``samestep.hydra.build`` compares their arguments with a signature instead.
    Foreign nodes have a ``_target_`` of another library, and keys may be added and removed.
    Replaced nodes have another ``_target_`` than the reference, which says nothing of them.

    Args:
        cfg: the configuration.
        reference: every key there is, each with a value of the right type.
        groups: the files of each group.
        project_rules: rules of the user's own keys.
        added: keys that the user typed with a plus, as in ``+model.net.width=2``. A node with a
            class of the user's own package takes them as further arguments.
    """

    def __init__(
        self,
        cfg: DictConfig,
        reference: DictConfig,
        groups: Mapping[str, Sequence[str]],
        project_rules: ProjectRules,
        added: Sequence[str],
    ) -> None:
        self.groups = groups
        self.rules = {**rules.RULES, **project_rules.rules}
        self.own_targets = project_rules.targets
        self.added = set(added)
        self.defaults = flatten(reference)
        self.nodes = {parent for key in self.defaults for parent in parents_of(key)}
        # Where the reference has a single value, a group of keys is one value too: the wrong one.
        single = {key for key, leaf in self.defaults.items() if not isinstance(leaf.text, dict)}
        self.written = flatten(cfg, whole=single)
        self.foreign: set[str] = set()
        self.replaced: set[str] = set()
        self._find_open_nodes()

    def faults(self) -> list[Fault]:
        """What is wrong with the configuration."""
        return [
            *self._find_unknown_keys(),
            *self._find_missing_keys(),
            *self._find_wrong_values(),
        ]

    def _find_open_nodes(self) -> None:
        for key, leaf in self.written.items():
            node, _, name = key.rpartition(".")
            if name != "_target_":
                continue
            is_known = node in self.nodes or parent_of(node) in COLLECTIONS
            default = self.defaults.get(key)
            if is_known and (default is None or default.text != leaf.text):
                self.replaced.add(node)
            elif is_known and not str(leaf.text).startswith((*KEPT, *self.own_targets)):
                self.foreign.add(node)

    def _is_open(self, key: str) -> bool:
        return is_below(key, self.foreign) or is_below(key, self.replaced)

    def _find_unknown_keys(self) -> Iterator[Fault]:
        # Lightning's flags exist, whether configs/trainer lists them or not.
        known = {*self.defaults, *self.nodes, *rules.OF_TRAINER}
        for key, leaf in self.written.items():
            if key in known or self._is_open(key) or self._is_added_argument(key):
                continue
            for full_key, value in leaves(leaf.text, key).items():
                # A secret is often typed with a wrong key, such as logger.wandb.api_key.
                shown = HIDDEN if is_secret_name(full_key) else show(value)
                yield full_key, f"{full_key}={shown}: no such key; {self._suggest(full_key, shown)}"

    def _is_added_argument(self, key: str) -> bool:
        """Whether ``key`` was typed with a plus, and is an argument of a class of the user's."""
        target = self.written.get(f"{parent_of(key)}._target_")
        is_own = target is not None and str(target.text).startswith(self.own_targets)
        return is_own and key in self.added

    def _find_missing_keys(self) -> Iterator[Fault]:
        present = {*self.written, *(node for key in self.written for node in parents_of(key))}
        missing: dict[str, None] = {}  # in order, each once
        for key in self.defaults:
            path = [*parents_of(key), key]
            if key in present or any(node in self.written for node in path):
                continue  # a value in the place of a whole node is a wrong value
            highest = next(node for node in path if node not in present)
            is_optional = highest in COLLECTIONS or parent_of(highest) in COLLECTIONS
            if not is_optional and not self._is_open(key):
                missing[highest] = None
        for key in missing:
            yield key, f"~{key}: a run needs this key"

    def _find_wrong_values(self) -> Iterator[Fault]:
        for key, leaf in self.written.items():
            default = self.defaults.get(key)
            # An unchanged reference to another key is checked at that other key.
            if default is not None and "${" in str(leaf.text) and leaf.text == default.text:
                continue
            value = resolve(leaf)
            if isinstance(value, MissingMandatoryValue):
                yield key, f"{key} is not set: add {key}=VALUE"
            elif isinstance(value, OmegaConfBaseException):
                why = str(value).splitlines()[0].rpartition("interpolation: ")[2]
                yield key, f"{key}={show(leaf.text)}: {why}"
            elif must := self._must_be(key, value):
                yield key, f"{key}={show(leaf.text)}: must be {must}"

    def _must_be(self, key: str, value: Any) -> str:
        """What the value of ``key`` should be; nothing if it is that."""
        if is_below(key, self.replaced):
            return ""
        is_foreign = is_below(key, self.foreign)
        if key in self.rules and (key in self.defaults or not is_foreign):
            return what_rule_says(self.rules[key], key, value)
        if key in self.nodes:
            like: Any = {}
        elif key in self.defaults:
            like = resolve(self.defaults[key])
        else:
            return ""
        if is_like(value, like) or (value is None and is_foreign):
            return ""
        group = key.replace(".", "/")
        hint = f"; a file is chosen by {group}=NAME" if group in self.groups else ""
        return TYPES[type(like)] + hint

    def _suggest(self, key: str, shown: str) -> str:
        """What was probably meant by ``key``, which does not exist."""
        if key.split(".")[0] in LAID_OVER:
            return "its file must begin with # @package _global_"
        keys = [known for known in {**self.defaults, **rules.OF_TRAINER} if "._" not in known]
        if near := nearest(key, [*keys, *self.groups]):
            return f"did you mean {near}={shown}?"
        # The nearest node that exists: its names are what could be typed.
        node = next((parent for parent in reversed(parents_of(key)) if parent in self.nodes), "")
        start = f"{node}." if node else ""
        names = [known.removeprefix(start) for known in self.defaults if known.startswith(start)]
        tops = dict.fromkeys(name.partition(".")[0] for name in names if name[0] != "_")
        shown = textwrap.shorten(", ".join(tops), 200, placeholder=" ...")
        return f"{node or 'train.yaml'} has {shown}"


def what_rule_says(rule: Rule, key: str, value: object) -> str:
    """What ``rule`` wants instead of ``value``; nothing if it holds."""
    if rule.holds(value):
        return ""
    near = nearest(str(value), rule.choices)
    return rule.text + (f"; did you mean {key}={near}?" if near else "")


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
        if group in NO_GROUPS:
            continue
        names = sorted(file.stem for file in folder.glob("*.yaml"))
        groups[group] = [name for name in names if f"{group}/{name}" not in SHARED]
    return groups


def plain(node: DictConfig) -> dict[str, Any]:
    """The node as it is written, interpolations as text."""
    content = OmegaConf.to_container(node)
    assert isinstance(content, dict)
    return {str(name): value for name, value in content.items()}


def flatten(node: DictConfig, whole: Container[str] = (), prefix: str = "") -> dict[str, Leaf]:
    """The values below ``node`` by their full keys; what is below a key of ``whole`` is one value.

    Names may contain dots, as files do, so a leaf keeps the node that holds it.
    """
    found: dict[str, Leaf] = {}
    content: Any = OmegaConf.to_container(node)
    for name, text in content.items():  # a name may be a number, as in scheduling: {1: 3}
        key = f"{prefix}{name}"
        if isinstance(text, dict) and text and key not in whole:
            found |= flatten(node[name], whole, f"{key}.")
        else:
            found[key] = Leaf(node, name, text)
    return found


def parents_of(key: str) -> list[str]:
    """The keys of the nodes above, the highest first: ``a.b.c`` is below ``a`` and ``a.b``."""
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def parent_of(key: str) -> str:
    """The key of the node that holds ``key``; empty at the top."""
    return key.rpartition(".")[0]


def is_below(key: str, nodes: Container[str]) -> bool:
    """Whether ``key`` is that of one of the nodes, or stands below one."""
    return any(node in nodes for node in (*parents_of(key), key))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word or key that was probably meant; the last part of a key counts as much."""
    word = word.lower()  # RUN_ID is typed as a variable and means run_id

    def alike(key: str) -> float:
        last, key_last = (re.split("[./]", text)[-1] for text in (word, key))
        whole = SequenceMatcher(None, word, key).ratio()
        return (last == key_last) + (whole + SequenceMatcher(None, last, key_last).ratio()) / 2

    best = max(known, key=alike, default="")
    return best if alike(best) >= 0.6 else None


def show(value: object) -> str:
    """The value as it is typed in an override."""
    return value if isinstance(value, str) else json.dumps(value)


def escape(value: Any) -> Any:
    """Copy plain containers so that OmegaConf gives every text back as it is."""
    if isinstance(value, dict):
        return {key: escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escape(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: rf"{match[1] * 2}\${{", value)
    return value


def resolve(leaf: Leaf) -> Any:
    """The value as a run gets it, or the error that this raises."""
    try:
        value = leaf.node[leaf.name]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        return error


def is_like(value: Any, default: Any) -> bool:
    """Whether ``value`` is of the type of ``default``; anything is like null or an error."""
    if default is None or isinstance(default, Exception):
        return True
    if isinstance(default, float):
        return type(value) in (int, float) and math.isfinite(value)
    if isinstance(default, list) and isinstance(value, list):
        return not default or all(is_like(item, default[0]) for item in value)
    return type(value) is type(default)
