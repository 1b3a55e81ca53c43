import dataclasses
import random
from collections import UserDict, namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from samestep.callbacks.batch_digest import BatchDigest

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Data:
    x: Any
    name: str = ""


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any


class Lazy(dict):
    """Loads what it is asked for."""

    def values(self) -> Any:
        raise AssertionError

    __getitem__ = items = values


class Broken:
    @property
    def __dict__(self) -> Any:
        raise RuntimeError


TENSORS = {
    "float32": torch.arange(4000.0),
    "bfloat16": torch.arange(4000).bfloat16(),
    "float8": torch.arange(400).to(torch.float8_e4m3fn),
    "bool": torch.arange(4000) % 3 == 0,
    "transposed": torch.arange(4000.0).reshape(40, 100).T,
    "images": torch.arange(4 * 3 * 32 * 32).reshape(4, 3, 32, 32).permute(0, 2, 3, 1),
    "gradient": torch.arange(4000.0).requires_grad_(),
    "number": torch.tensor(2.0),
    "array": np.arange(4000).reshape(40, 100),
    "Fortran": np.asfortranarray(np.arange(4000).reshape(40, 100)),
    "int": 3,
    "float": 0.5,
}
PLACES = [
    lambda x: x,
    lambda x: [torch.ones(2), x],
    lambda x: (x, ["text"]),
    lambda x: Pair(1, x),
    lambda x: {"a": {"b": x}},
    lambda x: Lazy(a=x),
    lambda x: UserDict(a=x),
    lambda x: Data(x),
    lambda x: Slotted(x),
    lambda x: SimpleNamespace(store=SimpleNamespace(mapping={"x": x})),
]


def digest(batch: Any) -> int:
    return BatchDigest(batch).checksum


@pytest.mark.parametrize("kind", TENSORS)
def test_it_sees_another_sample_wherever_it_is(kind: str):
    value = TENSORS[kind]
    other = value * 0 if kind not in ("bool", "float8") else torch.zeros_like(value)
    for place in PLACES:
        assert digest(place(value)) != 0
        assert digest(place(value)) == digest(place(value)) != digest(place(other))


def test_it_sees_another_order_of_samples_and_each_of_many():
    samples = torch.rand(512, 3, 16, 16)
    before = digest(samples)
    assert digest(samples.flip(0)) != before
    for changed in random.Random(0).sample(range(512), 20):
        other = samples.clone()
        other[changed] = 0.0
        assert digest(other) != before


def test_it_ignores_what_is_no_sample_and_never_fails():
    image = torch.ones(3)
    assert digest([image, "/tmp/1"]) == digest([image, "/tmp/2"])
    assert digest([image, None, object()]) == digest([image, None, object()]) != 0
    for unknown in (None, "text", iter([1]), Broken(), [Broken(), 1], torch.ones(2, device="meta"),
                    torch.eye(2).to_sparse(), np.array([object()])):  # fmt: skip
        assert digest(unknown) == 0
    loop: list[Any] = []
    loop.append(loop)
    assert digest(loop) == 0
    assert digest([[[torch.ones(2)] * 50] * 50] * 50) != 0
