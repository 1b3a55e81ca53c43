"""A fixed choice of cells of the matrix, and the table in docs/foreign.md as a whole."""

from pathlib import Path

import pytest

from tests.foreign.__main__ import PAGE, read_table
from tests.foreign.matrix import COLUMNS, GOOD, Matrix
from tests.foreign.styles import STYLES

TABLE = read_table(PAGE.read_text())
CELLS = {
    "loader with a state (torchdata)": "SIGTERM",
    "manual optimization that accumulates": "SIGTERM",
    "running mean as a float": "SIGTERM",
    "ReduceLROnPlateau by epoch": "SIGKILL",
    "BaseFinetuning: unfreezes in epoch 1": "SIGKILL",
    "VAE: stochastic test_step, add_image": "undisturbed",
    "no sync_dist": "2 ranks",
}
"""What no other test shows by a whole run, and is cheap: about 3 s of processor time each."""


def test_the_table_has_every_style_and_every_cell_is_good():
    assert TABLE.keys() == {style.name for style in STYLES}
    words = {word for row in TABLE.values() for word in row}
    assert words <= set(GOOD)
    assert len({Matrix.id_of(style) for style in STYLES}) == len(STYLES) >= 30


@pytest.mark.parametrize(("name", "column"), CELLS.items(), ids=[*CELLS])
def test_a_cell_is_what_the_table_says(name: str, column: str, tmp_path: Path):
    (style,) = (style for style in STYLES if style.name == name)
    cell = Matrix(tmp_path / "project").run(style, [column])[column]
    assert cell.word == TABLE[name][COLUMNS.index(column)], cell.why
