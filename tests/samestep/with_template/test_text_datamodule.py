"""What the DataModule refuses, and what it keeps in a checkpoint."""

import pytest

from samestep.errors import ConfigError
from samestep.ranks import environment
from tests.project.language import test_datamodule

TEXT, make = test_datamodule.TEXT, test_datamodule.make  # `make` is a fixture


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
        ("abc" * 7, {}, "leave 17, 2 and 2 of the 21 .* test at least 2|must not exceed"),
        (TEXT, {"val_share": 0.5, "test_share": 0.6}, "leave 0, "),
        (TEXT, {"test_share": 1e-6}, "leave 1188, 132 and 0 of"),
        (TEXT, {"context": 1056}, "more than data.context=1056"),
        (TEXT, {"global_batch_size": 500}, "must not exceed the 130 training windows"),
    ],
)
def test_a_text_that_is_too_short_is_refused(make, text: str, options, message: str):
    with pytest.raises(ConfigError, match=message) as error:
        make(text, **options).setup("fit")
    assert "mine.txt" in str(error.value)


def test_a_batch_that_the_ranks_cannot_share_is_refused(make, monkeypatch):
    monkeypatch.setattr(environment, "world_size", lambda: 5)
    with pytest.raises(ConfigError, match=r"data.global_batch_size=4: .* 5 ranks"):
        make().setup("fit")
