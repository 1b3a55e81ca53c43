"""Compares a configuration with its *reference*, in which each key has a valid value. No torch."""

import math
import textwrap
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from omegaconf import DictConfig
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from samestep.hydra import rules
from samestep.hydra.nodes import (
    Leaf,
    flatten,
    is_below,
    nodes_of,
    parent_of,
    parents_of,
    resolve,
)
from samestep.hydra.project import find_packages
from samestep.hydra.rule import STRING, Rule, is_number
from samestep.hydra.suggestions import (
    did_you_mean,
    find_other_name,
    is_probably,
    nearest,
    show,
)
from samestep.ranks.secrets import HIDDEN, is_secret_name
from samestep.run_spec import leaves

OVERLAYS = ("experiment", "debug", "local")  # groups that change values and add no keys
COLLECTIONS = ("callbacks", "logger")  # nodes of nodes, to which a run may add its own
# Targets whose arguments are all listed in configs/.
CHECKED_TARGETS = ("samestep.", "lightning.Trainer")
TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: STRING,
    list: "a list of the same kind as its default",
    dict: "a group of keys",
}
OF_CHECKPOINTS = ("ckpt_path", "resume_from_checkpoint", "resume")  # of other projects
OF_RUN = "a run continues by its name: repeat the command with RUN_ID=NAME"
AMBIGUOUS = ("name", "mode", "seed", "url")  # names that things of several groups have
Fault = tuple[str, str]  # a full key, and a line that names the key, its value and the remedy
Value = TypeVar("Value")


class Targets(NamedTuple):
    """The nodes with a ``_target_``, by what the reference can say about their keys."""

    replaced: set[str]
    """Nodes with another class than in the reference, which says nothing about them."""
    foreign: set[str]
    """Nodes of other libraries: configs/ need not list all arguments, and any may be removed."""
    own: set[str]
    """Nodes of the user's package: they take further arguments, if typed with a plus."""


class Comparison:
    """Compares a configuration with its reference.

    Args:
        cfg: the configuration.
        reference: has every key there is, each with a value of the right type.
        groups: the groups of configs/ and their choices, for suggestions.
    """

    def __init__(
        self,
        cfg: DictConfig,
        reference: DictConfig,
        groups: Mapping[str, Sequence[str]],
    ) -> None:
        self.groups = groups
        defaults = flatten(reference)
        # A group of keys in the place of a single value is compared as one value: the wrong one.
        single = {key for key, leaf in defaults.items() if not isinstance(leaf.text, dict)}
        self.written = flatten(cfg, whole=single)
        self.targets = find_targets(self.written, defaults)
        # `samestep.hydra.build` checks the arguments of replaced nodes, by the signature of the
        # class.
        self.defaults = _without(defaults, self.targets.replaced)
        self.rules = _without(rules.RULES, self.targets.replaced)

    def faults(self, added: Container[str]) -> list[Fault]:
        """All faults.

        Args:
            added: the keys that were typed with a plus, as in ``+model.net.width=2``.
        """
        targets = self.targets
        compared = _without(self.written, targets.replaced)
        free = {key for key in compared if key in added and parent_of(key) in targets.own}
        return [
            *find_unknown_keys(compared, self.defaults, self.groups, targets.foreign | free),
            *find_missing_keys(compared, self.defaults, targets.foreign),
            # Below replaced nodes too, each value must be set and resolvable.
            *self.wrong_values(self.written),
        ]

    def wrong_values(self, written: Mapping[str, Leaf]) -> list[Fault]:
        """The faults of some of the values."""
        foreign = self.targets.foreign
        return [*find_wrong_values(written, self.defaults, self.groups, foreign, self.rules)]


def find_targets(written: Mapping[str, Leaf], defaults: Mapping[str, Leaf]) -> Targets:
    """Classify the nodes with a ``_target_``."""
    found = Targets(set(), set(), set())
    nodes = nodes_of(defaults)
    own = tuple(f"{package}." for package in (*find_packages(), "examples"))
    checked = (*CHECKED_TARGETS, *own)
    for key, leaf in written.items():
        node, _, name = key.rpartition(".")
        if name != "_target_":
            continue
        target = str(leaf.text)
        if target.startswith(own):
            found.own.add(node)
        # Elsewhere a new node is an unknown key, whatever its class.
        if node not in nodes and parent_of(node) not in COLLECTIONS:
            continue
        if key not in defaults or defaults[key].text != target:
            found.replaced.add(node)
        elif not target.startswith(checked):
            found.foreign.add(node)
    return found


def _without(by_key: Mapping[str, Value], nodes: Container[str]) -> dict[str, Value]:
    return {key: value for key, value in by_key.items() if not is_below(key, nodes)}


def find_unknown_keys(
    written: Mapping[str, Leaf],
    defaults: Mapping[str, Leaf],
    groups: Mapping[str, Sequence[str]],
    open_nodes: Container[str],
) -> Iterator[Fault]:
    """The keys that the reference does not have, each with a suggestion."""
    # Lightning's flags exist, whether configs/trainer lists them or not.
    existing = {*defaults, *rules.OF_TRAINER, *nodes_of(defaults)}
    for key, leaf in written.items():
        if key in existing or is_below(key, open_nodes):
            continue
        for full_key, value in leaves(leaf.text, key).items():
            # A secret is often typed with a wrong key, such as logger.wandb.api_key.
            shown = HIDDEN if is_secret_name(full_key) else show(value)
            hint = _hint(full_key, value, shown, defaults, groups)
            yield full_key, f"{full_key}={shown}: no such key; {hint}"


def _hint(
    key: str,
    value: Any,
    shown: str,
    defaults: Mapping[str, Leaf],
    groups: Mapping[str, Sequence[str]],
) -> str:
    """What a user of an unknown key probably meant, or could have meant."""
    top, _, rest = key.partition(".")
    if top in OVERLAYS:
        return "its file must begin with # @package _global_"
    if key.split(".")[-1] in OF_CHECKPOINTS:
        return OF_RUN
    choice = rest.split(".")[0]
    if top in COLLECTIONS and choice in groups.get(top, ()):
        return f"its file is not chosen; add {top}={choice}"
    near = find_other_name(key, [*defaults, *groups])
    if near is None:
        near = nearest(key, _find_candidates(key, value, defaults, groups))
    if near:
        return f"did you mean {near}={shown}?"
    return _list_names(key, defaults)


def _find_candidates(
    key: str, value: Any, defaults: Mapping[str, Leaf], groups: Iterable[str]
) -> list[str]:
    """The keys and groups that may have been meant."""
    candidates = [*defaults, *rules.OF_TRAINER]
    # A choice is a text.
    if isinstance(value, str):
        candidates += groups
    found = []
    for candidate in candidates:
        # A typo hardly means a _target_.
        is_possible = "._" not in candidate and not _is_elsewhere(key, candidate)
        if is_possible and is_probably(key, candidate):
            found.append(candidate)
    return found


def _is_elsewhere(key: str, candidate: str) -> bool:
    """Whether a candidate is another thing of the same name: each group may have a ``name``."""
    *groups, name = key.split(".")
    other_groups = candidate.split(".")[:-1]
    return name in AMBIGUOUS and bool(groups) and groups[0] not in other_groups


def _list_names(key: str, defaults: Mapping[str, Leaf]) -> str:
    """A hint with the names in the nearest existing node above ``key``."""
    nodes = nodes_of(defaults)
    node = ""
    for parent in parents_of(key):
        if parent in nodes:
            node = parent
    names = []
    for known in _with_nodes(defaults):
        above, _, name = known.rpartition(".")
        if above == node and not name.startswith("_"):
            names.append(name)
    listed = textwrap.shorten(", ".join(names), 200, placeholder=" ...")
    return f"{node or 'train.yaml'} has {listed}"


def _with_nodes(values: Iterable[str]) -> list[str]:
    """The keys of these values and of all nodes above them; a node stands before its values."""
    # A dict is a set with an order.
    found: dict[str, None] = {}
    for key in values:
        found |= dict.fromkeys([*parents_of(key), key])
    return list(found)


def find_missing_keys(
    written: Mapping[str, Leaf], defaults: Mapping[str, Leaf], foreign: Container[str]
) -> Iterator[Fault]:
    """The keys of the reference that were removed; of a whole node, only the node."""
    # The whole configuration is a node too.
    nodes = nodes_of(written) | {""}
    present = {*written, *nodes}
    for key in _with_nodes(defaults):
        parent = parent_of(key)
        # Below a removed node its keys are missing too, and one line is enough. A single value in
        # the place of a node is a wrong value, not a node without keys.
        is_removed = key not in present and parent in nodes
        # A run need not have the callbacks and loggers of the reference.
        of_collection = key in COLLECTIONS or parent in COLLECTIONS
        is_optional = of_collection or is_below(key, foreign)
        if is_removed and not is_optional:
            yield key, f"~{key}: a run needs this key"


def find_wrong_values(
    written: Mapping[str, Leaf],
    defaults: Mapping[str, Leaf],
    groups: Mapping[str, Sequence[str]],
    foreign: Container[str],
    all_rules: Mapping[str, Rule],
) -> Iterator[Fault]:
    """The values that cannot be resolved, break a rule, or differ in type from their default."""
    nodes = nodes_of(defaults)
    for key, leaf in written.items():
        default = defaults.get(key)
        if default and _is_same_reference(leaf, default):
            continue
        value = resolve(leaf)
        if isinstance(value, OmegaConfBaseException):
            yield key, _unresolved(key, leaf, value)
            continue
        must = None
        if key in all_rules:
            must = _broken_rule(key, value, all_rules[key])
        elif value is None and is_below(key, foreign):
            # Most arguments of other libraries may be null; their class knows which.
            continue
        elif default:
            must = _other_type(key, value, resolve(default), groups)
        elif key in nodes:
            must = _other_type(key, value, {}, groups)
        if must:
            yield key, f"{key}={show(leaf.text)}: must be {must}"


def _unresolved(key: str, leaf: Leaf, error: OmegaConfBaseException) -> str:
    if isinstance(error, MissingMandatoryValue):
        return f"{key} is not set: add {key}=VALUE"
    # OmegaConf's message begins with the interpolation, and continues with its own types.
    why = str(error).splitlines()[0].rpartition("interpolation: ")[2]
    return f"{key}={show(leaf.text)}: {why}"


def _is_same_reference(leaf: Leaf, default: Leaf) -> bool:
    # An unchanged reference to another key is checked at that key, and reported once.
    return "${" in str(leaf.text) and leaf.text == default.text


def _broken_rule(key: str, value: Any, rule: Rule) -> str | None:
    """What the value must be, if it breaks the rule."""
    if rule.holds(value):
        return None
    return rule.text + did_you_mean(f"{key}=", value, rule.choices, "; ")


def _other_type(key: str, value: Any, default: Any, groups: Container[str]) -> str | None:
    """What the value must be, if it is not of the type of its default."""
    if same_type(value, default):
        return None
    text = TYPES[type(default)]
    # model.optimizer=sgd was probably meant as model/optimizer=sgd.
    group = key.replace(".", "/")
    return f"{text}; a file is chosen by {group}=NAME" if group in groups else text


def same_type(value: Any, default: Any) -> bool:
    """Whether ``value`` is of the type of ``default``."""
    # Neither null nor an interpolation without a value tells the type.
    if default is None or isinstance(default, Exception):
        return True
    if isinstance(default, float):
        # 1 is a valid learning rate. A default of nan, for missing data, shows that a key takes it.
        takes_any = isinstance(value, float) and not math.isfinite(default)
        return is_number(value) or takes_any
    if isinstance(default, list) and isinstance(value, list):
        # An empty list does not tell the type of its items.
        return not default or all(same_type(item, default[0]) for item in value)
    return type(value) is type(default)
