"""A fixed choice of cells of the matrix, and the table in docs/foreign.md as a whole."""

from pathlib import Path

from labs.foreign.__main__ import PAGE, read_table
from labs.foreign.matrix import COLUMNS, GOOD, Matrix
from labs.foreign.styles import OF_LIBRARIES, STYLES, libraries

FOLDER = Path(libraries.__file__).parent
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


def test_styles_of_libraries_name_code_that_is_there():
    assert len({Matrix.id_of(style) for style in OF_LIBRARIES}) == len(OF_LIBRARIES) >= 20
    texts = {path.stem: path.read_text() for path in FOLDER.glob("*.py")}
    for style in OF_LIBRARIES:
        for kind in (style.model, style.data):
            # The libraries are not here, so nothing can be imported.
            if isinstance(kind, str):
                *_, module, name = kind.split(".")
                assert f"\nclass {name}(" in texts[module]


def test_cells_are_what_the_table_says(tmp_path: Path):
    (style,) = (style for style in STYLES if style.name == STYLE)
    cells = Matrix(tmp_path / "project").run(style, CELLS)
    assert [cell.word for cell in cells.values()] == ["identical", "announced"]
    for column, cell in cells.items():
        assert cell.word == TABLE[STYLE][COLUMNS.index(column)], cell.why
