"""What ``samestep verify`` finds in the records of two runs, and which notes explain it."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from samestep.plugins import data_of_ranks, loss_check
from samestep.verify import compare, known_notes, records
from samestep.verify.compare import FLOAT64, Difference
from samestep.verify.known_notes import INTERRUPTED, RANKS
from samestep.verify.plan import file_of
from samestep.verify.recorder import digests_of, parts_of, summary_of
from samestep.verify.records import Batch, Rank

WEIGHT = "parameter net.weight"
LR = "setting lr of group 0 of the optimizer"


def state_of(step: int, **others: float) -> records.Summaries:
    values = {WEIGHT: 1.0 + step, LR: 0.1, "buffer mean": 3.0, "optimizer-state m of w": 4.0}
    values |= {name.replace("_", " ", 1): value for name, value in others.items()}
    return {name: summary_of(torch.full((4,), value), 8) for name, value in values.items()}


def make_rank() -> Rank:
    """Six batches in two epochs, each with a step."""
    rank = Rank()
    for step in range(6):
        batch = Batch(step, [step, step + 100], 0.5, state_of(step))
        rank.batches[divmod(step, 3)] = batch
    rank.evaluations["validation", 1, 6] = {"val_loss": 0.25}
    rank.final = state_of(5)
    return rank


def change(rank: Rank, place: tuple[int, int], **facts: object) -> None:
    rank.batches[place] = rank.batches[place]._replace(**facts)


def first(ours: Rank, folder: Path) -> Difference | None:
    return compare.first_difference([ours], [make_rank()], folder, folder)


FAULTS: dict[str, tuple[Callable[[Rank], object], str, str]] = {
    "samples": (
        lambda rank: change(rank, (1, 0), rows=[3, 7]), "samples",
        "from step 4 (epoch 1, batch 0) in the samples: 1 of 2 rows",
    ),
    "order": (
        lambda rank: change(rank, (1, 0), rows=[103, 3]), "samples",
        "from step 4 (epoch 1, batch 0) in the order of the samples",
    ),
    "loss": (
        lambda rank: change(rank, (1, 1), loss=0.75), "loss",
        "from step 5 (epoch 1, batch 1) in the loss by 0.25",
    ),
    "parameter": (
        lambda rank: change(rank, (0, 1), state=state_of(1, parameter_net2=1.0)), "parameter",
        "from step 2 (epoch 0, batch 1) in whether there is parameter net2",
    ),
    "value": (
        lambda rank: change(rank, (0, 1), state=state_of(1) | {WEIGHT: state_of(3)[WEIGHT]}),
        "parameter", "from step 2 (epoch 0, batch 1) in parameter net.weight by 2",
    ),
    "schedule": (
        lambda rank: change(rank, (0, 1), state=state_of(1) | {LR: state_of(0)[WEIGHT]}),
        "setting", "in setting lr of group 0 of the optimizer by 0.9",
    ),
    "missing": (
        lambda rank: rank.batches.pop((1, 2)), "length", "it has no batch 2 in epoch 1",
    ),
    "metric": (
        lambda rank: rank.evaluations.update({("validation", 1, 6): {"val_loss": 0.5}}), "metric",
        "in the validation after step 6 in val_loss by 0.25",
    ),
    "final": (
        lambda rank: setattr(rank, "final", state_of(7)), "parameter",
        "at the end of training in parameter net.weight by 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_first_difference_is_named(name: str, tmp_path: Path):
    plant, kind, text = FAULTS[name]
    assert first(make_rank(), tmp_path) is None
    ours = make_rank()
    plant(ours)
    if kind == "samples":
        # What follows from it comes later, and is not named.
        change(ours, (1, 1), loss=0.75)
    found = first(ours, tmp_path)
    assert found is not None
    assert (found.kind, text in found.text) == (kind, True), found


def test_rows_of_metrics_are_compared_without_what_is_measured(tmp_path: Path):
    for name, loss in (("ours", 0.5), ("theirs", 0.25)):
        (tmp_path / name).mkdir()
        table = f"epoch,step,time/epoch_s,train_loss\n0,1,{loss},0.5\n0,2,{loss},{loss}\n"
        (tmp_path / name / "metrics.csv").write_text(table)
    ranks = [make_rank()]
    found = compare.first_difference(ranks, ranks, tmp_path / "ours", tmp_path / "theirs")
    assert found is not None
    assert found.text == "metrics.csv, row of step 2: in train_loss by 0.25"


def split(rank: Rank) -> list[Rank]:
    """The records of two ranks that share the batches of one."""
    parts = [deepcopy(rank), deepcopy(rank)]
    for index, part in enumerate(parts):
        for place, batch in part.batches.items():
            part.batches[place] = batch._replace(rows=[batch.rows[index]])
    return parts


def test_ranks_are_compared_up_to_rounding():
    one = make_rank()
    assert list(compare.differences_between(split(one))) == []
    assert list(compare.differences_from_one(split(one), one, FLOAT64)) == []
    for error, is_found in ((1e-13, False), (1e-9, True)):
        ours = split(one)
        summary = summary_of(torch.full((4,), 2.0 + error, dtype=torch.float64), 8)
        change(ours[0], (0, 1), state=state_of(1) | {WEIGHT: summary})
        found = [*compare.differences_from_one(ours, one, FLOAT64)]
        assert len(found) == is_found
    assert found[0].text.startswith(
        "from step 2 (epoch 0, batch 1) in parameter net.weight by 1e-09"
    )


def test_ranks_that_diverge_or_cut_a_batch_wrongly_have_no_excuse():
    one = make_rank()
    ours = split(one)
    ours[1].final = state_of(7)
    found = next(compare.differences_between(ours))
    assert found.is_inexcusable
    assert "rank 1 differs from rank 0 at the end of training in parameter" in found.text
    ours = split(one)
    change(ours[1], (0, 0), rows=[])
    found = next(compare.differences_from_one(ours, one, FLOAT64))
    assert (found.kind, found.is_inexcusable) == ("slice", True)
    ours = split(one)
    change(ours[1], (0, 0), rows=[7])
    found = next(compare.differences_from_one(ours, one, FLOAT64))
    assert (found.kind, found.is_inexcusable) == ("samples", False)


def test_an_element_that_is_not_among_the_values_is_seen():
    own, other = torch.zeros(1000), torch.zeros(1000)
    own[501] = 0.5
    states = [{WEIGHT: summary_of(tensor, 8)} for tensor in (own, other)]
    (found,) = compare.differences_of_states(*states)
    assert found.amount == 0.5


def test_a_repeated_batch_takes_the_place_of_the_first(tmp_path: Path):
    lines = [{"place": [0, 0], "step": 0, "rows": [1], "loss": loss} for loss in (0.5, 0.25)]
    text = "\n".join(map(json.dumps, lines))
    file_of(tmp_path, 0).write_text(text + '\n{"place": [0, 1], "st')
    (rank,) = records.read(tmp_path)
    assert [batch.loss for batch in rank.batches.values()] == [0.25]


def test_padding_does_not_make_another_sample():
    short, long = torch.tensor([[5, 6, 0], [7, 8, 9]]), torch.tensor([[5, 6, 0, 0, 0]])
    assert digests_of(long) == digests_of(short)[:1]
    assert digests_of(torch.tensor([[6, 5, 0]])) != digests_of(short)[:1]
    batch = {"x": short, "name": ["a", "b"], "more": (torch.tensor(3.0), {"y": long})}
    assert [len(digests_of(part)) for part in parts_of(batch)] == [2, 2, 0, 1]


def test_graphs_that_were_put_together_are_samples_of_their_own():
    """As PyTorch Geometric's Batch: other ranks put others together."""
    x = torch.arange(10.0).reshape(5, 2)
    both = SimpleNamespace(x=x, ptr=torch.tensor([0, 2, 5]))
    alone = SimpleNamespace(x=x[2:], ptr=torch.tensor([0, 3]))
    (part,), (other,) = parts_of(both), parts_of(alone)
    assert len(digests_of(part)) == 2
    assert digests_of(part)[1:] == digests_of(other)


NOTES = {
    known_notes.LOADER: data_of_ranks.NOTE_ON_RANKS,
    known_notes.STREAM: data_of_ranks.NOTE_ON_STREAMS,
    known_notes.RANDOM_TRANSFORMS: data_of_ranks.NOTE_ON_DRAWS,
}


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.meaning)
def test_a_note_explains_its_own_kind_of_difference_only(note: known_notes.KnownNote):
    said = f"Run: runs/mine\n{NOTES[note]}\n"
    (column,) = note.columns
    found = known_notes.find(said, column, note.kinds[0])
    assert found is not None
    assert found[0].meaning == note.meaning
    assert found[1] == NOTES[note]
    assert known_notes.find(said, column, "parameter") is None
    other = RANKS if column == INTERRUPTED else INTERRUPTED
    found = known_notes.find(said, other, note.kinds[0])
    assert found is None or found[0] is not note


def test_random_numbers_that_change_the_samples_explain_other_samples_too():
    """Such as Kornia's transforms in ``on_after_batch_transfer``."""
    moved, stepped = (
        loss_check.explain(loss_check.RANDOM, where)
        for where in (loss_check.WHILE_MOVED, " (dropout)")
    )
    for kind, note in (
        ("samples", known_notes.RANDOM_TRANSFERS), ("parameter", known_notes.RANDOM_STEPS),
    ):  # fmt: skip
        found = known_notes.find(f"{moved}\n", RANKS, kind)
        assert found is not None
        assert found[0] is note
    assert known_notes.find(f"{stepped}\n", RANKS, "samples") is None
