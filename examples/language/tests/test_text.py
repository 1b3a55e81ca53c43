"""From a text to windows: what is split, what is encoded, and what is predicted how often."""

from pathlib import Path

import pytest
import torch

from examples.language.text import NO_TARGET, OTHER, Vocabulary, Windows, read_text, split
from samestep import RunError


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
    inputs, targets = windows[torch.arange(len(windows))]
    known = targets != NO_TARGET
    assert targets[known].tolist() == text[1:].tolist()
    assert (targets - inputs)[known].unique().tolist() == [1]


def test_python_ships_the_text():
    text = read_text(None)
    assert len(text) > 300_000
    assert 'Assert statements are a convenient way' in text  # fmt: skip


def test_a_file_is_read_as_utf_8(tmp_path: Path):
    (tmp_path / "mine.txt").write_bytes("naïve\r\n".encode())
    assert read_text(str(tmp_path / "mine.txt")) == "naïve\n"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    for name, why in {"latin.txt": "UTF-8", "none.txt": "No such file", ".": "directory"}.items():
        with pytest.raises(RunError, match=why) as error:
            read_text(str(tmp_path / name))
        assert f"data.file={tmp_path / name}" in str(error.value)


def test_training_windows_are_whole():
    windows = Windows(torch.arange(11), context=4, stride=3, with_rest=False)
    inputs, targets = windows[torch.tensor([2, 0])]
    assert len(windows) == 3
    assert inputs.tolist() == [[6, 7, 8, 9], [0, 1, 2, 3]]
    assert targets.tolist() == [[7, 8, 9, 10], [1, 2, 3, 4]]
    assert len(Windows(torch.arange(4), context=4, stride=3, with_rest=False)) == 0


def test_a_rank_may_get_no_window():
    inputs, targets = Windows(torch.arange(9), 4, 4, with_rest=True)[torch.arange(0)]
    assert inputs.shape == targets.shape == (0, 4)
