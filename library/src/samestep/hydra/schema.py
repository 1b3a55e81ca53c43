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
from samestep.run_spec import leaves

OVERLAYS = ("experiment", "debug", "local")  # groups that change values and bring no own keys
SHARED = (  # parts of others, not to be chosen
    "data/default", "model/default", "cluster/common", "cluster/pods", "cluster/kubernetes"
)  # fmt: skip
NOT_GROUPS = ("sweep",)  # folders of configs/ whose files are no part of a run: samestep sweep
COLLECTIONS = ("callbacks", "logger")  # nodes of nodes, to which a run may add its own
# Targets whose keys are all listed in configs/.
CHECKED_TARGETS = ("samestep.", "lightning.Trainer")
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


def compare(
    cfg: DictConfig,
    reference: DictConfig,
    groups: Mapping[str, Sequence[str]],
    project_rules: ProjectRules,
    added: Container[str],
) -> list[Fault]:
    """What is wrong with a configuration.

    ``reference`` has every key there is, each with a value of the right type. The keys of ``added``
    were typed with a plus, as in ``+model.net.width=2``: a node with a class of the user's own
    package takes them as further arguments.
    """
    defaults = flatten(reference)
    # Where the reference has a single value, a group of keys is one value too: the wrong one.
    single = {key for key, leaf in defaults.items() if not isinstance(leaf.text, dict)}
    written = flatten(cfg, whole=single)

    # ``samestep.hydra.build`` compares the arguments of some nodes with a signature instead. Of
    # those with another _target_ than its own the reference says nothing at all.
    targets = {key: str(leaf.text) for key, leaf in written.items() if key.endswith("._target_")}
    nodes = nodes_of(defaults)
    replaced, foreign = set(), set()
    for key, target in targets.items():
        node = parent_of(key)
        if node not in nodes and parent_of(node) not in COLLECTIONS:
            continue
        if key not in defaults or defaults[key].text != target:
            replaced.add(node)
        # Of another library: configs/ need not have all arguments, and keys may be left out.
        elif not target.startswith((*CHECKED_TARGETS, *project_rules.targets)):
            foreign.add(node)
    compared = {key: leaf for key, leaf in written.items() if not is_below(key, replaced)}
    defaults = {key: leaf for key, leaf in defaults.items() if not is_below(key, replaced)}
    all_rules = {**rules.RULES, **project_rules.rules}
    all_rules = {key: rule for key, rule in all_rules.items() if not is_below(key, replaced)}

    own = [parent_of(key) for key in targets if targets[key].startswith(project_rules.targets)]
    free = [key for key in compared if key in added and parent_of(key) in own]
    return [
        *find_unknown_keys(compared, defaults, groups, {*foreign, *free}),
        *find_missing_keys(compared, defaults, foreign),
        # Also below replaced nodes each value must be set, and each reference must lead somewhere.
        *find_wrong_values(written, defaults, groups, foreign, all_rules),
    ]


def find_unknown_keys(
    written: Mapping[str, Leaf],
    defaults: Mapping[str, Leaf],
    groups: Mapping[str, Sequence[str]],
    open_nodes: Container[str],
) -> Iterator[Fault]:
    """The keys that the reference does not have, each with what was probably meant."""
    nodes = nodes_of(defaults)
    # Lightning's flags exist, whether configs/trainer lists them or not.
    known = {**defaults, **rules.OF_TRAINER}
    for key, leaf in written.items():
        if key in known or key in nodes or is_below(key, open_nodes):
            continue
        for full_key, value in leaves(leaf.text, key).items():
            # A secret is often typed with a wrong key, such as logger.wandb.api_key.
            shown = HIDDEN if is_secret_name(full_key) else show(value)
            near = nearest(full_key, [*(name for name in known if "._" not in name), *groups])
            if full_key.split(".")[0] in OVERLAYS:
                hint = "its file must begin with # @package _global_"
            elif near:
                hint = f"did you mean {near}={shown}?"
            else:
                # The nearest node that exists: its names are what could be typed.
                above = (node for node in reversed(parents_of(full_key)) if node in nodes)
                node = next(above, "")
                start = f"{node}." if node else ""
                below = [name.removeprefix(start) for name in defaults if name.startswith(start)]
                tops = dict.fromkeys(name.partition(".")[0] for name in below if name[0] != "_")
                names = textwrap.shorten(", ".join(tops), 200, placeholder=" ...")
                hint = f"{node or 'train.yaml'} has {names}"
            yield full_key, f"{full_key}={shown}: no such key; {hint}"


def find_missing_keys(
    written: Mapping[str, Leaf], defaults: Mapping[str, Leaf], foreign: Container[str]
) -> Iterator[Fault]:
    """The keys of the reference that were removed, the highest of each branch, each once."""
    present = {*written, *nodes_of(written)}
    missing: dict[str, None] = {}
    for key in defaults:
        path = [*parents_of(key), key]
        # A value in the place of a whole node is a wrong value, not a missing one.
        if key in present or is_below(key, written) or is_below(key, foreign):
            continue
        highest = next(node for node in path if node not in present)
        if highest not in COLLECTIONS and parent_of(highest) not in COLLECTIONS:
            missing[highest] = None
    for key in missing:
        yield key, f"~{key}: a run needs this key"


def find_wrong_values(
    written: Mapping[str, Leaf],
    defaults: Mapping[str, Leaf],
    groups: Mapping[str, Sequence[str]],
    foreign: Container[str],
    all_rules: Mapping[str, Rule],
) -> Iterator[Fault]:
    """The values that cannot be resolved, break a rule, or have another type than the default."""
    nodes = nodes_of(defaults)
    for key, leaf in written.items():
        default = defaults.get(key)
        # An unchanged reference to another key is checked at that other key.
        if default is not None and "${" in str(leaf.text) and leaf.text == default.text:
            continue
        value, must = resolve(leaf), ""
        if isinstance(value, MissingMandatoryValue):
            yield key, f"{key} is not set: add {key}=VALUE"
        elif isinstance(value, OmegaConfBaseException):
            why = str(value).splitlines()[0].rpartition("interpolation: ")[2]
            yield key, f"{key}={show(leaf.text)}: {why}"
        elif key in all_rules:
            rule = all_rules[key]
            if not rule.holds(value):
                must = rule.text + did_you_mean(f"{key}=", value, rule.choices, "; ")
        elif default is not None or key in nodes:
            like = {} if default is None else resolve(default)
            if not same_type(value, like) and not (value is None and is_below(key, foreign)):
                group = key.replace(".", "/")
                hint = f"; a file is chosen by {group}=NAME" if group in groups else ""
                must = TYPES[type(like)] + hint
        if must:
            yield key, f"{key}={show(leaf.text)}: must be {must}"


def no_such_choice(group: str, choice: object, choices: Sequence[str]) -> str:
    """What to say when the ``group`` holds no such file."""
    hint = did_you_mean(f"{group}=", choice, choices, "; ") or ";"
    return f"{group}={show(choice)}: no such choice{hint} there is {', '.join(choices) or 'none'}"


def choices_of(*folders: Path) -> dict[str, list[str]]:
    """The groups in these folders of configs, and the files that may be chosen in each."""
    groups: dict[str, list[str]] = {}
    for configs in folders:
        for folder in sorted(path for path in configs.rglob("*") if path.is_dir()):
            group = folder.relative_to(configs).as_posix()
            if group in NOT_GROUPS:
                continue
            names = {*groups.get(group, []), *(file.stem for file in folder.glob("*.yaml"))}
            groups[group] = sorted(name for name in names if f"{group}/{name}" not in SHARED)
    return dict(sorted(groups.items()))


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


def walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``node`` and every value within it, each with its path."""
    yield path, node
    if isinstance(node, dict):
        for key, child in node.items():
            yield from walk(child, f"{path}.{key}".lstrip("."))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from walk(child, f"{path}[{index}]")


def nodes_of(flat: Iterable[str]) -> set[str]:
    """The keys of all nodes above these keys."""
    return {parent for key in flat for parent in parents_of(key)}


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


def did_you_mean(start: str, word: object, known: Iterable[str], before: str = "") -> str:
    """A hint such as ``did you mean model=mlp?``; nothing if no known word is near."""
    near = nearest(str(word), known)
    return f"{before}did you mean {start}{near}?" if near else ""


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


def same_type(value: Any, default: Any) -> bool:
    """Whether ``value`` is of the type of ``default``; anything is like null or an error."""
    if default is None or isinstance(default, Exception):
        return True
    if isinstance(default, float):
        return type(value) in (int, float) and math.isfinite(value)
    if isinstance(default, list) and isinstance(value, list):
        return not default or all(same_type(item, default[0]) for item in value)
    return type(value) is type(default)
