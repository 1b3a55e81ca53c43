"""From a text to windows: what is split, what is encoded, and what is predicted how often."""

import pytest
import torch

from project.language.text import NO_TARGET, OTHER, Vocabulary, Windows, split


@pytest.mark.parametrize("length", [10, 99, 1000])
def test_the_split_is_the_text_in_three_pieces(length: int):
    text = "".join(chr(100 + i) for i in range(length))
    train, val, test = split(text, 0.2, 0.1)
    assert train + val + test == text
    assert not set(train) & set(val) | set(val) & set(test) | set(train) & set(test)
    assert (len(val), len(test)) == (round(0.2 * length), round(0.1 * length))


def test_ids_and_characters():
    vocabulary = Vocabulary.of_text("ccc aaa  b\N{SNOWMAN}", 4)
    assert vocabulary.characters == " ac", "the most frequent ones, in their own order"
    assert len(vocabulary) == 4
    assert vocabulary.encode("cab\N{SNOWMAN}~ a").tolist() == [3, 2, OTHER, OTHER, OTHER, 1, 2]
    assert vocabulary.decode([3, 2, OTHER, 1]) == "ca\N{REPLACEMENT CHARACTER} "
    assert Vocabulary.of_text("ba", 100).characters == "ab"


@pytest.mark.parametrize("length", [2, 5, 9, 10, 12])
def test_each_character_but_the_first_is_predicted_once(length: int):
    text = torch.arange(length)
    windows = Windows(text, context=4, stride=4, with_rest=True)
    batch = windows[torch.arange(len(windows))]
    known = batch.targets != NO_TARGET
    assert batch.targets[known].tolist() == text[1:].tolist()
    assert (batch.targets - batch.inputs)[known].unique().tolist() == [1]
