"""The baselines against a slow count, and against the figures in the experiment's file."""

import math
import re
from collections import Counter

import pytest
import torch

from project.language.baselines import bits_per_character
from project.language.datamodule import TextDataModule
from samestep.hydra import build
from samestep.hydra.compose import check
from tests.conftest import CONFIGS

HEADER = (CONFIGS / "experiment/language.yaml").read_text().partition("defaults:")[0]


def probability(train: list[int], history: list[int], character: int, num_ids: int) -> float:
    """Witten and Bell, as it is written down."""
    shorter = 1 / num_ids
    if history:
        shorter = probability(train, history[1:], character, num_ids)
    n = len(history)
    follows = Counter(train[i + n] for i in range(len(train) - n) if train[i : i + n] == history)
    total, kinds = sum(follows.values()), len(follows)
    return (follows[character] + kinds * shorter) / (total + kinds) if total else shorter


@pytest.mark.parametrize("order", [1, 2, 5])
def test_the_fast_count_is_the_slow_one(order: int):
    generator = torch.Generator().manual_seed(0)
    train, test = (torch.randint(4, (n,), generator=generator) for n in (200, 40))
    train[train == 3] = 0  # a character that is only in the test
    slow = 0.0
    for i in range(1, len(test)):
        history = test[max(0, i - order + 1) : i].tolist()
        slow -= math.log2(probability(train.tolist(), history, int(test[i]), 4))
    assert bits_per_character(train, test, order, 4) == pytest.approx(slow / (len(test) - 1))


def test_the_probabilities_of_all_characters_add_up_to_one():
    train, history = torch.randint(5, (100,)), torch.tensor([1, 0, 2, 2, 4])

    def bits(text: torch.Tensor) -> float:
        return (len(text) - 1) * bits_per_character(train, text, 5, 5)

    texts = [torch.cat([history, torch.tensor([character])]) for character in range(5)]
    assert sum(2 ** (bits(history) - bits(text)) for text in texts) == pytest.approx(1)


@pytest.fixture(scope="module")
def data() -> TextDataModule:
    data = build.datamodule(check(["experiment=language"]))
    data.setup("test")
    return data


def test_the_file_of_the_experiment_states_the_baselines(data: TextDataModule):
    ours = {}
    for order in (1, 5):
        ours[order] = bits_per_character(
            data.train_set.characters, data.test_set.characters, order, len(data.vocabulary)
        )
    assert ours[5] < ours[1] - 1
    stated = {int(n): float(bits) for n, bits in re.findall(r"(\d)-gram (\d\.\d+)", HEADER)}
    assert stated.keys() == {1, 5}
    if data.digest.startswith(re.search(r"SHA-256 (\w{8})", HEADER)[1]):
        assert stated == pytest.approx(ours, abs=0.0006)
    else:  # the text of another version of Python
        assert stated == pytest.approx(ours, abs=0.3)
