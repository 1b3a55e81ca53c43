"""Encoding and decoding of single values. Within a run: test_attributes.py."""

import random
from argparse import Namespace
from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from samestep.callbacks.state_codec import (
    MISSING,
    CannotDecodeError,
    Decoder,
    Encoder,
    Packed,
    find_class,
)


class Mode(Enum):
    FAST = 1


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Frozen:
    value: Any


class Slotted:
    __slots__ = ("empty", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


def round_trip(value: Any, into: Any = MISSING) -> Any:
    packed = Packed()
    encoder = Encoder(set(), packed.put, 1000)
    encoded = encoder.encode(value)
    assert encoder.is_complete
    return Decoder(packed.joined(), torch.device("cpu")).decode(into, encoded)


@pytest.mark.parametrize(
    "value",
    [
        None, 1.5, float("inf"), 1 + 2j, b"bytes", Mode.FAST, [1, [2]], (1, "two"), {3},
        deque([4], 5), OrderedDict(a=[6]), {(1, 2): "tuple"}, Pair(1, 2), Frozen(3),
        Namespace(four=4), np.float32(2.5), -(10**5000), {10**5000: 7},
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_value_is_restored_with_its_class(value):
    restored = round_trip(value)
    assert restored == value
    assert type(restored) is type(value)


def test_arrays_tensors_and_slots_are_restored():
    restored = round_trip(Slotted([np.arange(3), torch.ones(2, requires_grad=True)]))
    array, tensor = restored.value
    assert array.tolist() == [0, 1, 2]
    assert tensor.tolist() == [1, 1]
    assert tensor.requires_grad
    assert not hasattr(restored, "empty")


def test_a_generator_needs_one_that_exists():
    generator = random.Random(1)
    encoded = generator.getstate()
    other = random.Random(2)
    assert round_trip(generator, other) is other
    assert other.getstate() == encoded
    with pytest.raises(CannotDecodeError):
        round_trip(generator)


@pytest.mark.parametrize(
    "value",
    [torch.ones(2).to_sparse(), torch.empty(2, device="meta"), np.array([object()]), iter([1])],
    ids=["sparse", "meta", "objects", "iterator"],
)
def test_what_cannot_be_restored_is_not_complete(value):
    encoder = Encoder(set(), lambda data: 0, 100)
    encoder.encode([value])
    assert not encoder.is_complete


@pytest.mark.parametrize("name", ["os:system", "subprocess:Popen", "no_such:Class", "torch:Tensor"])
def test_a_checkpoint_cannot_name_what_is_not_plain(name: str):
    with pytest.raises(CannotDecodeError):
        find_class(name)
