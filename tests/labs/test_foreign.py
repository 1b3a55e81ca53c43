"""A fixed choice of cells of the matrix, and the table in docs/foreign.md as a whole."""

from pathlib import Path

from labs.foreign.__main__ import OF_LIBRARIES_TABLE, PAGE, read_table
from labs.foreign.matrix import COLUMNS, GOOD, Matrix
from labs.foreign.styles import OF_LIBRARIES, STYLES

TABLE = read_table(PAGE.read_text())
STYLE, CELLS = "DataLoader", ["SIGTERM", "2 ranks"]
"""One that is identical, and one that is announced: that the matrix sees what the table says.

Each kind of style has its own tests, in library/tests/callbacks and test_logged_metrics.py.
"""


def test_the_table_has_every_style_and_every_cell_is_good():
    assert TABLE.keys() == {style.name for style in STYLES}
    words = {word for row in TABLE.values() for word in row}
    assert words <= set(GOOD)
    assert len({Matrix.id_of(style) for style in STYLES}) == len(STYLES) >= 30


def test_the_table_of_libraries_has_every_style():
    table = read_table(PAGE.read_text(), OF_LIBRARIES_TABLE)
    assert table.keys() == {style.name for style in OF_LIBRARIES}
    assert {word for row in table.values() for word in row} <= set(GOOD)
    assert len({Matrix.id_of(style) for style in OF_LIBRARIES}) == len(OF_LIBRARIES) >= 20


def test_cells_are_what_the_table_says(tmp_path: Path):
    (style,) = (style for style in STYLES if style.name == STYLE)
    cells = Matrix(tmp_path / "project").run(style, CELLS)
    assert [cell.word for cell in cells.values()] == ["identical", "announced"]
    for column, cell in cells.items():
        assert cell.word == TABLE[STYLE][COLUMNS.index(column)], cell.why
