"""Random numbers that are a pure function of a few whole numbers."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.random.mtrand as numpy_random
import torch


def mix_seed(*numbers: int) -> int:
    """One seed made of several whole numbers; neighbours give unrelated random streams.

    Source: the finalizer of splitmix64, Steele et al., https://doi.org/10.1145/2714064.2660195.
    """
    # Not hash(numbers): that of Python may change with its version, and an order must not.
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    # Below 2**63, so that it fits a signed integer of 64 bits, such as an element of a tensor.
    return state % 2**63


def generator(*numbers: int) -> torch.Generator:
    """A random generator on the CPU that is a pure function of some whole numbers."""
    return torch.Generator().manual_seed(mix_seed(*numbers))


def seed_others(seed: int) -> None:
    """Seed NumPy and Python's ``random``."""
    random.seed(seed)
    # NumPy's old generator takes 32 bits, and raises an error for more.
    np.random.seed(seed % 2**32)


def seed_all(seed: int) -> None:
    """Seed torch, GPUs included, NumPy and Python's ``random``."""
    torch.manual_seed(seed)
    seed_others(seed)


def seed_sample(*numbers: int) -> None:
    """Make the random numbers of a transform on the CPU a pure function of some whole numbers."""
    seed = mix_seed(*numbers)
    # Not torch.manual_seed: it also seeds every GPU, which takes longer than reading a sample.
    torch.default_generator.manual_seed(seed)
    seed_others(seed)


BITS_OF_SAMPLES = np.random.MT19937()
"""The source of NumPy's random numbers within ``isolated_rng``."""


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Leave the random numbers of torch, NumPy and ``random`` after this block as they were.

    Like Lightning's ``isolate_rng``, without GPUs, and fast enough for each batch.
    """
    state = random.getstate()
    torch_state = torch.get_rng_state()
    # Saving NumPy's state takes 0.1 ms; lending it another source of random bits takes nothing.
    bits = numpy_random.get_bit_generator()
    numpy_random.set_bit_generator(BITS_OF_SAMPLES)
    try:
        yield
    finally:
        numpy_random.set_bit_generator(bits)
        random.setstate(state)
        torch.set_rng_state(torch_state)


def draws(act: Callable[[], Any]) -> bool:
    """Whether a function draws random numbers of torch, NumPy or ``random``; none is lost by it."""

    def draw() -> tuple[float, ...]:
        return torch.rand(()).item(), np.random.rand(), random.random()

    with isolated_rng():
        seed_sample(0)
        untouched = draw()
        seed_sample(0)
        act()
        return draw() != untouched
