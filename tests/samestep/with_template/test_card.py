"""What the model card of an exported net says; that the Hub reads it: tests/project."""

from pathlib import Path

from project.card import write_card
from tests.project import test_card

run_dir = test_card.run_dir  # the fixture


def test_the_page_says_where_the_net_comes_from(run_dir: Path):
    inputs = ["uint8 [B, 3, 64, 64]"]
    page = write_card(run_dir, "best", ["cat", "dog"], 93_950, None, inputs)
    assert "license" not in page
    for fact in ("2 classes: cat, dog", "| test/accuracy | 0.7500 |",
                 "uint8 [B, 3, 64, 64]",
                 "3f2a1b, with uncommitted changes", "torch 2.15.0", "93950",
                 "python train.py data=folder data.root=... seed=1"):  # fmt: skip
        assert fact in page, fact
