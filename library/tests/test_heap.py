"""What objects hold, as bytes and back. Within a run: callbacks/test_objects.py."""

import array
import io
import os
import pickle
import queue
import random
import sqlite3
import subprocess
from argparse import Namespace
from collections import ChainMap, Counter, OrderedDict, UserList, defaultdict, deque
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from multiprocessing import Value
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from samestep import register
from samestep.heap import kinds
from samestep.heap.heap import Heap
from samestep.heap.stream import NotOursError, Reader

CPU = torch.device("cpu")


class Mode(Enum):
    FAST = 1


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Frozen:
    value: Any


class Slotted:
    __slots__ = "value"  # which is one slot

    def __init__(self, value: Any) -> None:
        self.value = value


class Words(list[str]):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0


class Holder:
    """Stands for a program; each process makes one."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def heap_of(holder: Holder) -> Heap:
    heap = Heap()
    heap.name_objects({"Holder": holder}, [])
    heap.begin()
    return heap


def after_restart(make: Any, change: Any) -> tuple[Holder, set[str]]:
    """A new program that has got what another one held after it was changed."""
    first, second = make(), make()
    heap = heap_of(first)
    change(first)
    packed = heap.dump()
    failed = heap_of(second).load(packed, CPU)
    return second, failed


NEW: list[Any] = [
    None, 1.5, float("inf"), 1 + 2j, b"bytes", Mode.FAST, [1, [2]], (1, "two"), {3}, frozenset({4}),
    deque([4], 5), OrderedDict(a=[6]), defaultdict(list, a=[1]), Counter("aab"), Pair(1, 2),
    {(1, 2): "tuple"}, Frozen(3), Namespace(four=4), SimpleNamespace(five=5), UserList([6]),
    ChainMap({"a": 7}), Decimal("1.5"), Fraction(1, 3), timedelta(3), range(3), Path("a"),
    np.float32(2), bytearray(b"xy"), array.array("d", [1.0]), partial(max, 1), np.dtype,
    torch.float16, -(10**5000), torch.nn.functional.relu, nn.L1Loss, torch.tanh,
]  # fmt: skip


@pytest.mark.parametrize("value", NEW, ids=lambda value: type(value).__name__)
def test_what_training_makes_is_made_again_with_its_class(value: Any):
    if isinstance(value, partial):
        value = partial(nn.functional.relu, inplace=False)
    restored, failed = after_restart(Holder, lambda holder: vars(holder).update(new=value))
    assert not failed
    assert type(restored.new) is type(value)
    if isinstance(value, partial):
        assert (restored.new.func, restored.new.keywords) == (value.func, value.keywords)
    else:
        assert restored.new == value


def grow(holder: Holder) -> None:
    holder.list.append(3)
    holder.words.append("a")
    holder.words.count += 1
    holder.slotted.value = [4]
    holder.tensor += 1
    holder.grown.resize_(3).fill_(2)
    holder.array += 1
    holder.objects[0] = Fraction(1, 2)
    holder.records["a"] += 5
    holder.numbers.append(2.0)
    holder.view[0] = 7
    holder.queue.put("q")
    holder.shared.value = 2.5
    holder.database.execute("create table t (v real)")
    holder.database.execute("insert into t values (1.5)")
    for generator in (holder.dice, holder.numpy):
        generator.random()
    torch.rand(1, generator=holder.torch)
    holder.net.p = 0.75
    holder.net.weights = torch.eye(2).to_sparse()


def program() -> Holder:
    return Holder(
        list=[1, 2], words=Words(), slotted=Slotted(0), tensor=torch.zeros(2), grown=torch.zeros(1),
        array=np.zeros(2), objects=np.zeros(2, object), records=np.zeros(2, [("a", "i4")]),
        numbers=array.array("d"), view=memoryview(bytearray(2)), queue=queue.Queue(),
        shared=Value("d", 0.0), database=sqlite3.connect(":memory:"), dice=random.Random(0),
        numpy=np.random.default_rng(0), torch=torch.Generator(), net=nn.Dropout(0.5),
    )  # fmt: skip


def test_what_the_program_has_is_changed_in_place():
    whole, second = program(), program()
    objects = dict(vars(second))
    heap = heap_of(whole)
    grow(whole)
    packed = heap.dump()
    assert not heap_of(second).load(packed, CPU)
    assert all(vars(second)[name] is value for name, value in objects.items())
    assert second.list == [1, 2, 3]
    assert (list(second.words), second.words.count) == (["a"], 1)
    assert second.slotted.value == [4]
    assert second.tensor.tolist() == [1, 1]
    assert second.grown.tolist() == [2, 2, 2]
    assert second.array.tolist() == [1, 1]
    assert second.objects.tolist() == [Fraction(1, 2), 0]
    assert second.records["a"].tolist() == [5, 5]
    assert second.numbers.tolist() == [2.0]
    assert bytes(second.view) == b"\x07\x00"
    assert second.queue.get_nowait() == "q"
    assert second.shared.value == 2.5
    assert second.database.execute("select v from t").fetchall() == [(1.5,)]
    assert second.dice.random() == whole.dice.random()
    assert second.numpy.random() == whole.numpy.random()
    assert torch.rand(1, generator=second.torch) == torch.rand(1, generator=whole.torch)
    assert second.net.p == 0.75


def test_what_never_changed_is_not_written():
    heap = heap_of(program())
    assert heap.dump()["units"] == []


@pytest.mark.parametrize("item", ["file", ("file", 1)])
def test_a_long_list_of_texts_is_compared_as_a_whole(item: Any):
    def make() -> Holder:
        return Holder(files=[item] * 20_000)

    assert heap_of(make()).dump()["units"] == []
    restored, failed = after_restart(make, lambda holder: holder.files.__setitem__(7, "another"))
    assert not failed
    assert restored.files[6:8] == [item, "another"]


def test_one_object_stays_one_and_may_hold_itself():
    def change(holder: Holder) -> None:
        holder.first = holder.second = [holder.known]
        holder.first.append(holder.first)
        holder.deep = holder.known
        for _ in range(50):
            holder.deep = [holder.deep]

    restored, failed = after_restart(lambda: Holder(known={}), change)
    assert not failed
    assert restored.first is restored.second
    assert restored.first[0] is restored.known
    assert restored.first[1] is restored.first
    deep = restored.deep
    for _ in range(50):
        (deep,) = deep
    assert deep is restored.known


def test_what_nobody_has_any_more_is_not_missed():
    def change(holder: Holder) -> None:
        holder.forgotten = holder.tensor
        holder.tensor += 1
        holder.tensor = torch.ones(3)

    def make() -> Holder:
        return Holder(tensor=torch.zeros(2), forgotten=None)

    first, second = make(), make()
    heap, other = heap_of(first), heap_of(second)
    change(first)
    packed = heap.dump()
    assert not other.load(packed, CPU)
    second.forgotten = None
    assert not other.load({**packed, "units": packed["units"][:1]}, CPU)
    assert second.tensor.tolist() == [1, 1, 1]


def test_parts_functions_and_closures_that_are_exchanged():
    def counter() -> Any:
        count = 0

        def step() -> int:
            nonlocal count
            count += 1
            return count

        return step

    def make() -> Holder:
        net = nn.Sequential(nn.Linear(1, 1), nn.Tanh())
        return Holder(net=net, one=[1], other=[2], counter=counter(), function=torch.relu)

    def change(holder: Holder) -> None:
        holder.net[1] = nn.ReLU()
        holder.one, holder.other = holder.other, holder.one
        holder.counter()
        holder.function = torch.tanh
        holder.weight = holder.net[0].weight

    restored, failed = after_restart(make, change)
    assert not failed
    assert isinstance(restored.net[1], nn.ReLU)
    assert (restored.one, restored.other) == ([2], [1])
    assert restored.counter() == 2
    assert restored.function is torch.tanh
    assert restored.weight is restored.net[0].weight


def test_what_cannot_be_kept_is_named_and_the_rest_is_kept():
    def change(holder: Holder) -> None:
        holder.function = lambda: 1
        holder.meta = torch.empty(2, device="meta")
        # No state: what a library holds.
        holder.lines, holder.file = iter([1]), io.StringIO()
        holder.kept = 1

    holder = Holder()
    heap = heap_of(holder)
    change(holder)
    packed = heap.dump()
    assert heap.lost == {"Holder.function", "Holder.meta"}
    second = Holder()
    assert not heap_of(second).load(packed, CPU)
    assert vars(second) == {"kept": 1}


class Reservoir:
    """Memory that Python cannot see, as of a library."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(4))


def test_a_kind_can_be_registered():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "KINDS", dict(kinds.KINDS))
        register(
            "library:Reservoir",
            lambda reservoir: bytes(reservoir._memory),
            lambda reservoir, new: setattr(reservoir, "_memory", memoryview(bytearray(new))),
        )

        def change(holder: Holder) -> None:
            holder.old._memory[0] = 3
            holder.new = Reservoir()

        restored, failed = after_restart(lambda: Holder(old=Reservoir()), change)
    assert not failed
    assert restored.old._memory[0] == 3
    assert bytes(restored.new._memory) == bytes(4)


# -- Forged bytes ---------------------------------------------------------------------------------


class Trap:
    """An object of the program whose methods must not be called."""

    called: list[str] = []  # noqa: RUF012

    def __setstate__(self, state: Any) -> None:
        self.called.append("setstate")

    def append(self, item: Any) -> None:
        self.called.append("append")

    add = extend = __setitem__ = __call__ = append  # type: ignore[assignment]


class Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


def read(content: bytes) -> Any:
    return Reader(content, iter([]), {"trap": Trap()}.get, CPU).next_value()


NAME = pickle.SHORT_BINUNICODE + b"\x04trap" + pickle.BINPERSID
FORGED = {
    "reduce": pickle.dumps(Calls(os.system, "true"), 5),
    "subprocess": pickle.dumps(Calls(subprocess.Popen, ["true"]), 5),
    "eval": pickle.dumps(Calls(eval, "1"), 5),
    "getattr": pickle.dumps(Calls(getattr, [], "append"), 5),
    "import": pickle.dumps(Calls(__import__, "this"), 5),
    "object of another class": pickle.dumps(Frozen(1), 5),
    "call an object": NAME + b")R.",
    "build": NAME + b"}b.",
    "append": NAME + b"K\x01a.",
    "appends": NAME + b"(K\x01e.",
    "setitem": NAME + b"K\x01K\x02s.",
    "setitems": NAME + b"(K\x01K\x02u.",
    "additems": NAME + b"(K\x01\x90.",
    "global": b"cos\nsystem\n.",
    "inst": b"(ios\nsystem\n.",
    "obj": b"(" + NAME + b"o.",
    "newobj": NAME + b")\x81.",
    "newobj_ex": NAME + b")}\x92.",
    "ext": b"\x82\x01.",
    "persid": b"Ptrap\n.",
    "nothing": b"",
    "noise": b"\x80\x05\xff\xfe.",
    "end": b"K\x01",
}


@pytest.mark.parametrize("content", FORGED.values(), ids=FORGED)
def test_forged_bytes_run_nothing(content: bytes):
    Trap.called.clear()
    with pytest.raises(NotOursError, match="not what a run of samestep has written"):
        read(content)
    assert not Trap.called


def forge(maker: str, *arguments: Any) -> Any:
    """What a maker of ours gives for arguments that ``Writer`` does not write."""
    content = (
        b"\x8c" + bytes([20]) + b"samestep.heap.stream" + b"\x8c" + bytes([len(maker)])
        + maker.encode() + b"\x93" + pickle.dumps(arguments, 5)[2:-1] + b"R."
    )  # fmt: skip
    return read(content)


@pytest.mark.parametrize(
    ("maker", "arguments"),
    [
        ("make_object", ("os", "system")),
        ("make_object", ("subprocess", "Popen")),
        ("make_object", ("no_such", "Class")),
        ("make_object", ("tempfile", "TemporaryDirectory")),
        ("make_function", ("os", "system")),
        ("make_function", ("builtins", "eval")),
        ("make_function", ("shutil", "rmtree")),
        ("make_member", ("os", "environ", "PATH")),
        ("make_tuple", ("subprocess", "Popen", ())),
    ],
)
def test_makers_make_nothing_dangerous(maker: str, arguments: Any):
    assert type(forge(maker, *arguments)).__name__ == "Lost"


def test_an_object_with_a_finalizer_is_not_made():
    class Deletes:
        def __del__(self) -> None:
            """What it does depends on its attributes."""

    globals()["Deletes"] = Deletes
    Deletes.__qualname__ = "Deletes"
    assert type(forge("make_object", __name__, "Deletes")).__name__ == "Lost"
