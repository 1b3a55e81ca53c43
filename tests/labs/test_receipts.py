"""One of the planted causes, and their table as a whole."""

from pathlib import Path

from labs.receipts.__main__ import PAGE, TEMPLATE, examine, read_table
from labs.receipts.causes import CAUSES

TABLE = read_table(PAGE.read_text())


def test_the_table_has_every_cause_and_each_is_noticed():
    named = [cause.name for cause in CAUSES]
    assert TABLE.keys() == {*named, f"{TEMPLATE}{named[0]}"}
    assert len(named) >= 10
    for cause in CAUSES:
        note, twin = TABLE[cause.name]
        assert note.startswith("step 1")
        assert cause.says in note
        assert twin == "5 batches equal"


def test_a_cause_is_noticed_and_its_twin_is_not(tmp_path: Path):
    (cause,) = (cause for cause in CAUSES if cause.says == "another gradient")
    row = examine(cause, tmp_path)
    assert row.wrong == ""
    assert (row.note, row.twin) == TABLE[cause.name]
