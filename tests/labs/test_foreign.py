"""A fixed choice of cells of the matrix, its tables as a whole, and their summary in the docs."""

from pathlib import Path

import pytest

from labs import pages
from labs.foreign.__main__ import (
    MARKERS,
    PAGE,
    RESULTS,
    read_table,
    render,
    render_versions,
    summarize,
)
from labs.foreign.matrix import COLUMNS, GOOD, Matrix
from labs.foreign.styles import OF_LIBRARIES, STYLES, libraries

FOLDER = Path(libraries.__file__).parent
TABLES = [(STYLES, pages.MARKERS), (OF_LIBRARIES, MARKERS)]
TABLE = read_table(RESULTS.read_text())
STYLE, CELLS = "DataLoader", ["SIGTERM", "2 ranks"]
"""One that is identical, and one that is announced: that the matrix sees what the table says.

Each kind of style has its own tests, in library/tests/callbacks and test_logged_metrics.py.
"""


def test_the_table_has_every_style_and_every_cell_is_good():
    assert TABLE.keys() == {style.name for style in STYLES}
    words = {word for row in TABLE.values() for word in row}
    assert words <= set(GOOD)
    assert len({Matrix.id_of(style) for style in STYLES}) == len(STYLES) >= 30


def test_the_table_of_libraries_has_good_cells_and_the_versions_of_their_lock():
    table = read_table(RESULTS.read_text(), MARKERS)
    # Styles may be written before they are run, which takes an environment of their own.
    assert table.keys() == {style.name for style in OF_LIBRARIES}
    words = {word for row in table.values() for word in row}
    assert words <= set(GOOD)
    versions = render_versions()
    assert "litdata 0." in versions
    assert versions in pages.read_table(RESULTS.read_text(), MARKERS)


@pytest.mark.parametrize(("styles", "markers"), TABLES, ids=["all", "libraries"])
def test_a_table_is_read_as_it_was_written(styles, markers, tmp_path: Path):
    words_of = {style.name: ["identical"] * len(COLUMNS) for style in styles}
    words_of[styles[0].name][-1] = "rejected"
    words_of[styles[2].name] = ["identical", *["announced"] * 4]
    page = tmp_path / "page.md"
    page.write_text(RESULTS.read_text())
    pages.write_table(page, render(styles, words_of), markers)
    assert read_table(page.read_text(), markers) == words_of
    # The other table is as it was.
    for _, others in TABLES:
        if others != markers:
            old, new = RESULTS.read_text(), page.read_text()
            assert pages.read_table(new, others) == pages.read_table(old, others)


@pytest.mark.parametrize(("styles", "markers"), TABLES, ids=["all", "libraries"])
def test_the_page_has_a_summary_of_the_results(styles, markers):
    summary = pages.read_table(PAGE.read_text(), markers)
    assert summary == summarize(styles, read_table(RESULTS.read_text(), markers))
    cells = [line.split(" | ")[0].removeprefix("| ") for line in summary.splitlines()[2:]]
    counted = [int(cell.split()[0]) for cell in cells if cell.endswith(" styles")]
    named = [name for cell in cells if not cell.endswith(" styles") for name in cell.split("; ")]
    assert sum(counted) + len(named) == len(styles)


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
