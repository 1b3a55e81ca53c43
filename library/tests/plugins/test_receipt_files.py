"""The file of receipts, and what a comparison makes of two of them."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from samestep.plugins import receipt_files as receipts
from samestep.plugins.receipt_files import Comparison, Facts, Journal, Receipt

FACTS = Facts({"precision": "32-true"}, {"threads": 1}, {"train": 7})
RECEIPTS = [
    Receipt(1, 0, 0, None, None),
    Receipt(1, 1, 2**32 - 1, math.nan, 0.0),
    Receipt(2**31, 2**31, 5, -math.inf, 1e300),
]
ERROR = 1e-6


def write(path: Path, *groups: list[Receipt]) -> Journal:
    journal = Journal(path, FACTS, groups[0])
    for group in groups[1:]:
        for receipt in group:
            journal.append(receipt)
        journal.flush()
    return journal


def same(found: list[Receipt], expected: list[Receipt]) -> bool:
    return str(found) == str(expected)  # as text, in which a nan is equal to a nan


def test_what_is_read_is_what_was_written_up_to_what_is_damaged(tmp_path: Path):
    path = tmp_path / receipts.FILE
    assert receipts.read(path) is None
    write(path, RECEIPTS[:1], RECEIPTS[1:2], RECEIPTS[2:])
    facts, found = receipts.read(path)
    assert facts == FACTS
    assert same(found, RECEIPTS)
    content = path.read_bytes()
    end = len(content)
    # A process that is killed leaves any part of the last receipt.
    for cut in (1, receipts.SIZE - 1):
        path.write_bytes(content[: end - cut])
        assert same(receipts.read(path)[1], RECEIPTS[:2])
    for place in range(end - 2 * receipts.SIZE, end - receipts.SIZE):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert same(receipts.read(path)[1], RECEIPTS[:1])
    head = content.partition(b"\n")[0]
    other_format = json.dumps(json.loads(head) | {"format": 0}).encode()
    for damaged in (b"", b"\0" * 99, head[:20], b"[]\n", b'{"format": 1}\n', other_format + b"\n"):
        path.write_bytes(damaged)
        assert receipts.read(path) is None


def test_a_file_that_cannot_be_written_ends_no_run(tmp_path: Path, caplog: Any, monkeypatch: Any):
    path = tmp_path / receipts.FILE
    journal = write(path, [], RECEIPTS[:1])
    written = path.read_bytes()
    # A full disk takes a part of what is written.
    monkeypatch.setattr(os, "write", lambda file, content: len(content) - 1)
    for _ in range(2):
        journal.append(RECEIPTS[1])
        journal.flush()
    assert path.read_bytes() == written
    monkeypatch.undo()
    journal.append(RECEIPTS[1])
    journal.flush()
    journal.checkpoint_saved()
    assert path.read_bytes() == written
    caplog.set_level("INFO")
    lost = Journal(tmp_path / "missing" / receipts.FILE, FACTS, [])
    lost.append(RECEIPTS[0])
    lost.flush()
    assert "missing/receipts.bin cannot be written" in caplog.text


def test_a_long_file_keeps_what_was_trained_on_since_the_last_but_one_checkpoint(
    tmp_path: Path, monkeypatch: Any
):
    monkeypatch.setattr(receipts, "MAX_BYTES", 12 * receipts.SIZE)
    path = tmp_path / receipts.FILE
    journal = write(path, [])
    sizes = []
    for batch in range(60):
        journal.append(Receipt(0, batch, 1, float(batch), None))
        journal.flush()
        if batch % 5 == 4:
            journal.checkpoint_saved()
            _, found = receipts.read(path)
            sizes.append(len(found))
            assert [r.batch for r in found] == [*range(batch + 1 - len(found), batch + 1)]
    assert sizes[0] == 5
    assert all(5 <= size <= 20 for size in sizes)


def compare(
    before: list[tuple[float, float]], now: list[tuple[float, float]], tolerance: float = 0.0
) -> Comparison:
    """Compare losses and gradients of the same samples."""
    earlier = [Receipt(0, place, 1, *numbers) for place, numbers in enumerate(before)]
    comparison = Comparison(earlier, tolerance)
    for place, numbers in enumerate(now):
        comparison.compare(Receipt(0, place, 1, *numbers), place + 1)
    return comparison


def test_bits_are_compared_and_the_first_difference_is_named():
    same = [(0.5, 1.0), (math.nan, math.nan), (math.inf, 0.0)]
    equal = compare(same, same)
    assert (equal.note, equal.is_over, equal.num_batches) == ("", True, 3)
    assert equal.result()["result"] == receipts.EQUAL
    other = compare(same, [same[0], (0.5, math.nan), (1.0, 1.0)])
    assert other.note == (
        "step 2 is repeated on the same samples with another loss, 0.5 instead of nan: something "
        "that training changes is not in the checkpoint"
    )
    assert (other.num_batches, other.is_over) == (2, True)
    close = compare([(0.5, 0.0)], [(math.nextafter(0.5, 1), 0.0)])
    assert "another loss, 0.50000000000000011 instead of 0.5:" in close.note
    gradient = compare([(0.5, 1.0)], [(0.5, 2.0)])
    assert "on the same samples with the same loss and another gradient: some" in gradient.note
    # Without a checkpoint that is as old, there is nothing to compare with.
    unknown = Comparison([Receipt(0, 7, 1, 0.5, None)], 0.0)
    unknown.compare(Receipt(0, 8, 1, 0.6, None), 9)
    assert (unknown.num_batches, unknown.note, unknown.is_over) == (0, "", False)


@pytest.mark.parametrize(
    ("samples", "losses", "note"),
    [
        ((1, 2), (0.5, 0.6), "with other samples, or other random transforms"),
        # What is in no sample, such as unused memory, may differ.
        ((1, 2), (0.5, 0.5), ""),
        ((0, 2), (0.5, 0.6), "step 1 is repeated with another loss, 0.6 instead of 0.5"),
        ((0, 2), (None, None), ""),
        ((1, 1), (None, 0.5), ""),
        ((1, 2), (None, None), "with other samples"),
    ],
)
def test_samples_say_what_has_caused_another_loss(
    samples: tuple[int, int], losses: tuple[float | None, float | None], note: str
):
    comparison = Comparison([Receipt(0, 0, samples[0], losses[0], None)], 0.0)
    comparison.compare(Receipt(0, 0, samples[1], losses[1], None), 1)
    assert note in comparison.note
    assert bool(note) == bool(comparison.note)


def test_rounding_is_told_apart_where_bits_may_differ():
    before = [(1.0, 1.0)] * 40
    # Equal bits use up nothing: the tolerance grows from the first difference on.
    grown = [(1.0, 1.0)] * 10 + [(1.0 + ERROR * 2.0**k, 1.0) for k in range(6)]
    rounded = compare(before[:16], grown, 1.01 * ERROR)
    assert rounded.note == ""
    assert rounded.result()["result"] == receipts.ROUNDED
    assert rounded.largest == pytest.approx(ERROR * 32, rel=1e-3)
    assert "another loss" in compare(before[:16], grown).note
    first = compare(before, [(1.0 + 2 * ERROR, 1.0)], ERROR)
    assert first.note.startswith("step 1 is repeated on the same samples with another loss")
    # Where rounding could explain anything, nothing is said.
    chaos = [(1.0 + ERROR, 1.0)] + [(1.0, 1.0)] * 20 + [(9.0, 1.0)] * 19
    assert compare(before, chaos, 1.01 * ERROR).note == ""
    # Only the gradient is rounded differently; the next loss is judged.
    assert compare(before, [(1.0, 1.5), (1.0, 1.0)], ERROR).note == ""
    assert compare(before, [(1.0, 1.5), (1.1, 1.0)], ERROR).note.startswith("step 2")
    # A difference of large terms is near zero.
    assert compare([(1e-9, 1.0), (5.0, 1.0)], [(2e-9, 1.0)], ERROR).note == ""
    assert "nan" in compare([(1.0, 1.0)], [(math.nan, 1.0)], ERROR).note


def test_facts_name_what_makes_runs_incomparable():
    def change(**facts: Any) -> str:
        return FACTS._replace(**facts).find_change(FACTS)

    assert change(machine={"threads": 9}) == change(code={"train": 8}) == ""
    assert change(run={"precision": "64-true"}) == "another precision"
    assert change(run={"precision": "32-true", "accelerator": "cuda"}) == "another accelerator"
    for code, names in (({"other": 1}, []), ({"train": 8, "other": 1}, ["train"])):
        assert FACTS._replace(code=code).find_changed_code(FACTS) == names
