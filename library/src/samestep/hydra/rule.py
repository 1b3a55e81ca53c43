"""The kinds of rules: what a value must be, where the type of its default says too little.

``rules`` names one for a full key, such as ``{"data.global_batch_size": whole(1)}``; a key without
one takes values of its default's type. Imports no torch.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """What a value must be: as text, as a test, and its choices if it has any."""

    text: str
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] = ()

    def __or__(self, other: "Rule") -> "Rule":
        either = f"{self.text} or {other.text}"
        return Rule(either, lambda v: self.holds(v) or other.holds(v), self.choices + other.choices)


def whole(low: int, high: float = math.inf) -> Rule:
    """An int, but not a bool, from ``low`` to ``high``."""
    text = f"at least {low}" if high == math.inf else f"from {low} to {high}"
    return Rule(f"a whole number {text}", lambda v: type(v) is int and low <= v <= high)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite int or float, but not a bool."""
    # Not isinstance: in Python true is an int.
    return type(value) in (int, float) and math.isfinite(value)


def number(text: str, holds: Callable[[float], bool]) -> Rule:
    """A number for which ``holds``."""
    return Rule(text, lambda v: is_number(v) and holds(v))


def one_of(*choices: str) -> Rule:
    """One of these words."""
    text = "one of " * (len(choices) > 1) + ", ".join(choices)
    return Rule(text, lambda v: v in choices, choices)


def each(rule: Rule) -> Rule:
    """A list of values, each valid by ``rule``."""
    text, holds = f"a list, each {rule.text}", rule.holds
    return Rule(text, lambda v: isinstance(v, list) and all(map(holds, v)))


def some(text: str, rule: Rule) -> Rule:
    """A list with at least one value, each valid by ``rule``."""
    return Rule(text, lambda v: v != [] and each(rule).holds(v))


def matching(text: str, pattern: str) -> Rule:
    """A string that is as a whole of this pattern."""
    return Rule(text, lambda v: isinstance(v, str) and bool(re.fullmatch(pattern, v)))


NULL = Rule("null", lambda v: v is None)
BOOL = Rule("true or false", lambda v: isinstance(v, bool))
STRING = "a string (to pass 1 as a string: key=\"'1'\")"
TEXT = Rule(f"{STRING}, and not empty", lambda v: isinstance(v, str) and v.strip() != "")
ABOVE_0 = number("a number above 0", lambda v: v > 0)
BETWEEN_0_AND_1 = number("a number above 0 and below 1", lambda v: 0 < v < 1)
MAPPING = Rule("a mapping, such as {spec: {...}}", lambda v: isinstance(v, dict))
NODE = Rule("a group with a _target_", lambda v: isinstance(v, dict) and "_target_" in v)
