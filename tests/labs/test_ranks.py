"""Two rows of virtual ranks on one and two ranks, a planted fault, and the table as a whole."""

from pathlib import Path

import pytest

from labs import pages
from labs.ranks.__main__ import EQUAL, PAGE, is_good, line_of, run_rows
from labs.ranks.rows import CONTROL, ROWS, Row

FEW = [row for row in ROWS if row.name in ("RMSE", "experts that few slices use")]


def cells_of(line: str) -> list[str]:
    return line.strip("| ").split(" | ")


def test_the_table_has_every_row_and_all_are_equal():
    _, _, *lines = pages.read_table(PAGE.read_text()).splitlines()
    rows = [cells_of(line) for line in lines]
    assert [name for name, *_ in rows] == [row.name for row in [*ROWS, CONTROL]]
    assert len(ROWS) >= 20
    for name, _, *cells in rows[:-1]:
        assert cells == [EQUAL] * 3, name


@pytest.mark.program
def test_rows_on_two_ranks_have_the_bits_of_one(tmp_path: Path):
    for name, digests in run_rows(tmp_path, [*FEW, CONTROL], (1, 2)).items():
        assert is_good(name, digests), line_of(name, digests)


@pytest.mark.program
def test_another_order_of_the_sum_is_seen(tmp_path: Path):
    (digests,) = run_rows(tmp_path, FEW[:1], (1, 2), ORDER="wrong").values()
    assert all(digests.values())
    assert not is_good(FEW[0].name, digests)
    assert "2: weights" in line_of(FEW[0].name, digests)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"weights": "a", "metrics": "b"}, EQUAL),
        ({"weights": "c", "metrics": "b"}, "2: weights"),
        ({}, "2: no result"),
    ],
)
def test_what_differs_is_named(other: dict[str, str], says: str):
    digests = {("", 1): {"weights": "a", "metrics": "b"}, ("", 2): other}
    assert cells_of(line_of("some", digests))[2:] == [says, "-", "-"]
    assert is_good("some", digests) == (says == EQUAL)


def test_no_two_runs_of_the_control_may_be_equal():
    assert is_good(CONTROL.name, {("", 1): {"weights": "a"}, ("", 2): {"weights": "b"}})
    assert not is_good(CONTROL.name, {("", 1): {"weights": "a"}, ("", 2): {"weights": "a"}})


def test_names_can_be_found():
    rows: list[Row] = [*ROWS, CONTROL]
    assert len({row.name for row in rows}) == len(rows)
    assert not [row.name for row in rows if "|" in row.name]
