"""Hyperparameters of any type: the same value continues, another one is rejected by its name."""

import collections
import datetime
import decimal
import enum
import functools
import json
import math
import re
import threading
import types
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np
import pydantic
import pytest
import torch
import yaml
from torch import nn

from library.tests.kit import Net, batches, fit
from library.tests.programs import run_code
from samestep.errors import ConfigError
from samestep.heap.hyperparameters import describe
from samestep.run.changes import compare, read_config


@dataclass(frozen=True, slots=True)
class Inner:
    width: int = 8
    names: tuple[str, ...] = ("a", "b")


@dataclass
class Settings:
    loss_weight: float = 1.0
    inner: Inner = field(default_factory=Inner)
    made: float = field(default=0.0, compare=False)


@attrs.define
class Attrs:
    rate: float = 1.0


class Model(pydantic.BaseModel, extra="allow"):
    rate: float = 1.0


class Pair(NamedTuple):
    low: float
    high: float


class Kind(enum.Enum):
    SMALL = enum.auto()
    LARGE = enum.auto()


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Plain:
    """A class as anybody writes it, with what differs in each process."""

    momentum = 0.9

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self.lock = threading.Lock()
        self.own = self
        self.address = object()


class Config:
    lr = 0.1


class OtherConfig:
    lr = 0.1


class Raises:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def scaled(factor: float) -> Callable[[float], float]:
    return lambda x: x * factor


def holds_itself(value: float) -> list[Any]:
    values: list[Any] = [value]
    values.append(values)
    return values


def long(value: float) -> torch.Tensor:
    return torch.full((1000,), value)


VALUES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "dataclass": (lambda: Settings(1.0), lambda: Settings(2.0), "loss_weight"),
    "nested": (lambda: Settings(), lambda: Settings(inner=Inner(9)), "inner.width"),
    "not_compared": (lambda: Settings(made=1.0), lambda: Settings(2.0, made=2.0), "loss_weight"),
    "of_attrs": (lambda: Attrs(1.0), lambda: Attrs(2.0), "rate"),
    "of_pydantic": (lambda: Model(), lambda: Model(rate=2), "rate"),
    "extra": (lambda: Model(more=1), lambda: Model(more=2), "more"),
    "named_tuple": (lambda: Pair(1, 2), lambda: Pair(1, 3), ""),
    "member": (lambda: Kind.SMALL, lambda: Kind.LARGE, "name"),
    "level": (lambda: Level.LOW, lambda: Level.HIGH, ""),
    "path": (lambda: Path("a"), lambda: Path("b"), ""),
    "time": (
        lambda: datetime.timedelta(hours=1),
        lambda: datetime.timedelta(hours=2),
        "value",
    ),
    "decimal": (lambda: decimal.Decimal("0.10"), lambda: decimal.Decimal("0.11"), "value"),
    "complex": (lambda: 1 + 2j, lambda: 1 - 2j, "value"),
    "bytes": (lambda: b"a", lambda: b"b", "value"),
    "range": (lambda: range(3), lambda: range(4), "value"),
    "slice": (lambda: slice(3), lambda: slice(4), "value"),
    "nan": (lambda: math.nan, lambda: 0.0, ""),
    "nans": (lambda: [math.nan, 1], lambda: [math.nan, 2], ""),
    "zero": (lambda: -0.0, lambda: 0.0, ""),
    "infinite": (lambda: math.inf, lambda: -math.inf, ""),
    "huge": (lambda: 10**5000, lambda: 10**5000 + 1, ""),
    "number_or_text": (lambda: 1, lambda: "1", ""),
    "absent": (lambda: "absent", lambda: None, ""),
    "of_numpy": (lambda: np.float32(0.5), lambda: np.float32(0.25), ""),
    "array": (lambda: np.arange(3), lambda: np.arange(3) + 1, "values"),
    "tensor": (lambda: torch.ones(2), lambda: torch.zeros(2), "values"),
    "half": (lambda: torch.ones(2), lambda: torch.ones(2).half(), "dtype"),
    "long": (lambda: long(1), lambda: long(2), "digest"),
    "brain": (lambda: long(1).bfloat16(), lambda: long(2).bfloat16(), "digest"),
    "objects": (
        lambda: np.array([Settings(1.0)]),
        lambda: np.array([Settings(2.0)]),
        "values",
    ),
    "dtype": (lambda: torch.float32, lambda: torch.float16, "value"),
    "device": (lambda: torch.device("cpu"), lambda: torch.device("cuda"), "value"),
    "set": (lambda: {"a", "b", "c"}, lambda: {"a", "b"}, "items"),
    "set_of_objects": (lambda: {Inner(1), Inner(2)}, lambda: {Inner(1), Inner(3)}, "items"),
    "function": (lambda: math.sin, lambda: math.cos, "name"),
    "lambda": (lambda: lambda x: x + 1, lambda: lambda x: x + 2, "code.values"),
    "lambda_of_another": (lambda: lambda x: x + 1, lambda: lambda x: x - 1, "code.digest"),
    "lambda_within": (
        lambda: lambda x: lambda y: y in {"a", "b", x},
        lambda: lambda x: lambda y: y in {"a", "c", x},
        "code.values",
    ),
    "constant_set": (
        lambda: lambda x: x in {"a", "b", "c"},
        lambda: lambda x: x in {"a", "b", "d"},
        "code.values",
    ),
    "closure": (lambda: scaled(1), lambda: scaled(2), "factor"),
    "partial": (
        lambda: functools.partial(scaled, factor=1),
        lambda: functools.partial(scaled, factor=2),
        "keywords.factor",
    ),
    "method": (lambda: Plain(1).__eq__, lambda: Plain(2).__eq__, "self._rate"),
    "class": (lambda: Config, lambda: OtherConfig, "name"),
    "layer": (lambda: nn.ReLU, lambda: nn.GELU, "name"),
    "module": (
        lambda: nn.Sequential(nn.Linear(1, 2), nn.Dropout(0.1)),
        lambda: nn.Sequential(nn.Linear(1, 2), nn.Dropout(0.2)),
        "1.p",
    ),
    "loss": (
        lambda: nn.CrossEntropyLoss(torch.tensor([1.0, 2.0])),
        lambda: nn.CrossEntropyLoss(torch.tensor([1.0, 3.0])),
        "weight.values",
    ),
    "plain": (lambda: Plain(1), lambda: Plain(2), "_rate"),
    "namespace": (lambda: Namespace(a=1), lambda: Namespace(a=2), "a"),
    "simple": (lambda: types.SimpleNamespace(a=1), lambda: types.SimpleNamespace(a=2), "a"),
    "keys": (lambda: {1: 2, "1": 3, (1, 2): 4}, lambda: {1: 2, "1": 3, (1, 2): 5}, "[1, 2]"),
    "recursive": (lambda: holds_itself(1), lambda: holds_itself(2), ""),
    "pattern": (lambda: re.compile("a"), lambda: re.compile("b"), "value"),
    "deque": (lambda: collections.deque([1]), lambda: collections.deque([2]), ""),
    "broken": (lambda: Raises(), lambda: 1, ""),
    "no_text": (lambda: "\ud800", lambda: "\ud801", ""),
}  # fmt: skip


def saved(value: Any) -> Any:
    """What the next start reads from config.yaml."""
    return yaml.safe_load(yaml.safe_dump({"model": {"value": describe(value)}}))


@pytest.mark.parametrize("name", VALUES)
def test_the_same_value_continues_and_another_one_is_named(name: str):
    make, make_other, part = VALUES[name]
    old = saved(make())
    assert compare(old, saved(make())) == {}
    assert compare(old, {"model": {"value": describe(make())}}) == {}
    changed = compare(old, {"model": {"value": describe(make_other())}})
    assert f"model.value.{part}".rstrip(".") in changed


def describe_all() -> str:
    return json.dumps({name: describe(make()) for name, (make, *_) in VALUES.items()})


@pytest.mark.program
def test_another_process_describes_each_value_alike():
    code = "from library.tests.test_hyperparameters import *\nprint(describe_all())"
    done = run_code(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == describe_all()


@dataclass(frozen=True)
class Colliding:
    width: int

    def __hash__(self) -> int:
        return 0


@pytest.mark.parametrize("items", [(0, 8), (Colliding(1), Colliding(2))])
def test_the_order_of_a_set_does_not_count(items: tuple[Any, Any]):
    """Strings have another order in each process; these keep that in which they were added."""
    one, other = {*items}, {*items[::-1]}
    assert [*one] != [*other]
    assert describe(one) == describe(other)


def test_a_description_has_the_values():
    assert describe(Settings()) == {
        "class": f"{__name__}.Settings",
        "loss_weight": 1.0,
        "inner": {"class": f"{__name__}.Inner", "width": 8, "names": ["a", "b"]},
    }
    assert describe({3, 1, 2}) == {"class": "set", "items": [1, 2, 3]}
    # Hundreds of layers are not for people.
    net = describe(nn.Sequential(*(nn.Linear(1, 1) for _ in range(500))))
    assert net.keys() == {"class", "digest"}


class Saves(Net):
    """A module that saves what it gets."""

    def __init__(self, value: Any, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()


# Lightning says so of each value that cannot be pickled, such as a lambda.
@pytest.mark.filterwarnings("ignore:Attribute 'value' removed from hparams")
def test_a_run_continues_with_the_same_objects_only(tmp_path: Path, capsys):
    # Lightning cannot copy locks, and a copy of what raises is the user's error.
    left_out = ("plain", "broken", "method", "huge")
    given = {name: make for name, (make, *_) in VALUES.items() if name not in left_out}
    run_dir = tmp_path / "run"

    def module(**others: Any) -> Saves:
        values = {name: make() for name, make in given.items()} | others
        return Saves(values)

    fit(run_dir, module, max_epochs=1)
    capsys.readouterr()
    assert read_config(run_dir)["model"]["value"]["nested"]["inner"]["width"] == 8
    (part,) = fit(run_dir, module, max_epochs=1)
    part.trainer.fit(part.module, batches())
    assert capsys.readouterr().out.count("Nothing to do") == 2
    # At a raised limit nothing but the limit is a change.
    fit(run_dir, module)
    said = [line for line in capsys.readouterr().out.splitlines() if " -> " in line]
    assert said == ["  trainer.max_epochs: 1 -> 2"]
    with pytest.raises(ConfigError, match=r"model.value.nested.inner.width: 8 -> 9"):
        fit(run_dir, lambda: module(nested=Settings(inner=Inner(9))))
    # A whole object can be allowed by its key.
    other = Settings(2.0, Inner(9))
    fit(run_dir, lambda: module(nested=other), max_epochs=3, allow_changes=["model.value.nested"])
