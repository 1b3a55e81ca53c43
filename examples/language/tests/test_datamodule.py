"""What the DataModule rejects, and what it keeps in a checkpoint."""

from pathlib import Path

import pytest
import torch

from examples.language.datamodule import TextDataModule
from examples.language.text import NO_TARGET
from samestep import ConfigError

TEXT = "the quick brown fox jumps over the lazy dog\n" * 30  # 1320 characters


@pytest.fixture
def make(tmp_path: Path):
    """Makes a DataModule of a text."""

    def make(text: str = TEXT, name: str = "mine.txt", **options) -> TextDataModule:
        (tmp_path / name).write_text(text, "utf-8")
        defaults = {
            "file": str(tmp_path / name), "val_share": 0.1, "test_share": 0.1,
            "vocabulary_size": 128, "context": 16, "stride": 8, "global_batch_size": 4,
            "eval_batch_size": 4, "seed": 0,
        }  # fmt: skip
        return TextDataModule(**{**defaults, **options})

    return make


def test_no_part_sees_a_character_of_another(make):
    characters = "".join(chr(0x4E00 + i) for i in range(1000))  # all different
    data = make(characters, vocabulary_size=2000)
    data.setup("fit")
    assert data.vocabulary.characters == characters[:800], "of the training text only"
    targets = [targets.flatten().tolist() for _, targets in data.train_dataloader()]
    seen = {data.vocabulary.characters[i - 1] for batch in targets for i in batch}
    assert seen <= set(characters[1:800])
    for loader in (data.val_dataloader(), data.test_dataloader()):
        ids = torch.cat([targets[targets != NO_TARGET] for _, targets in loader])
        assert ids.tolist() == [0] * 99


@pytest.mark.parametrize("is_set_up_first", [False, True])
def test_another_text_than_that_of_the_checkpoint_is_rejected(make, is_set_up_first: bool):
    data, other = make(), make(TEXT + "!", "other.txt")
    data.setup("fit")
    if is_set_up_first:
        other.setup("fit")

    def continue_with_other() -> None:
        other.load_state_dict(data.state_dict())
        other.setup("test")

    message = r"this run has learned .*mine.txt .* and here is .*other.txt"
    with pytest.raises(ConfigError, match=message):
        continue_with_other()


def test_a_checkpoint_keeps_vocabulary_and_digest(make):
    data, other = make(), make()
    data.setup("fit")
    other.load_state_dict(data.state_dict())
    assert other.vocabulary.characters == data.vocabulary.characters
    other.setup("test")
    assert other.digest == data.digest


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "leave 0, 0 and 0 of the 0 characters"),
        (TEXT, {"val_share": 0.5, "test_share": 0.6}, "leave 0, "),
        (TEXT, {"test_share": 1e-6}, "leave 1188, 132 and 0 of"),
        (TEXT, {"context": 1056}, "more than data.context=1056"),
    ],
)
def test_a_text_that_is_too_short_is_rejected(make, text: str, options, message: str):
    with pytest.raises(ConfigError, match=message) as error:
        make(text, **options).setup("fit")
    assert "mine.txt" in str(error.value)


@pytest.mark.parametrize("name", ["val_share", "test_share", "context", "stride"])
def test_a_value_that_would_only_fail_later_is_rejected(make, name: str):
    with pytest.raises(ValueError, match="must be above 0, and vocabulary_size above 1"):
        make(**{name: 0})
    with pytest.raises(ValueError, match="must be above 0, and vocabulary_size above 1"):
        make(vocabulary_size=1)
