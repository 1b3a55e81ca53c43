"""Ranks for which the others wait, by a clock that each of them moves."""

from pathlib import Path
from unittest import mock

import pytest
from torch import Tensor
from torch.utils.data import Dataset

from library.tests.kit import Clock, Net, fit, make_spec
from samestep import BatchLoader
from samestep.plugins import slow_ranks, wall_time
from samestep.plugins.slow_ranks import BLOCKS, DATA, FORWARD, SlowRanks, find_slow
from samestep.ranks import collectives, environment
from samestep.run import record
from samestep.trainer import callbacks_of_run

FAST_S, SLOW_S = 1.0, 6.0
NUM_STEPS = 100


class Samples(Dataset):
    """Numbers that take so many seconds to read."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def __len__(self) -> int:
        return 4 * NUM_STEPS

    def __getitem__(self, ids: Tensor) -> Tensor:
        self.clock.now += self.seconds
        return ids.float()[:, None]


class Computes(Net):
    """Spends so many seconds in its forward pass, and always one in its backward pass."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def training_step(self, batch, batch_idx):
        self.clock.now += self.seconds
        return super().training_step(batch, batch_idx)

    def on_after_backward(self):
        self.clock.now += 1


def train_as_rank(
    clock: Clock, run_dir: Path, data_s: float, forward_s: float, others: list[Tensor]
) -> list[Tensor]:
    """Train as the first rank, of which the ``others`` sent these tables; returns its own."""
    sent = []

    def all_gather(own: Tensor) -> list[Tensor]:
        sent.append(own)
        return [own, *others[len(sent) - 1 : len(sent)]]

    with mock.patch.object(collectives, "all_gather", all_gather):
        fit(
            run_dir,
            lambda: Computes(clock, forward_s),
            lambda: BatchLoader(Samples(clock, data_s), 4),
            callbacks=lambda: [SlowRanks(run_dir)],
            max_epochs=1,
            log_every_n_steps=NUM_STEPS,
        )
    return sent


@pytest.mark.parametrize(
    ("data_s", "forward_s", "cause", "text"),
    [
        (SLOW_S, FAST_S, DATA, "waits for its data"),
        (FAST_S, SLOW_S, FORWARD, "computes its forward pass"),
        (FAST_S, FAST_S, "", ""),
    ],
)
def test_a_slow_rank_is_named_once_with_what_it_waits_for(
    tmp_path, monkeypatch, capsys, data_s, forward_s, cause, text
):
    clock = Clock()
    monkeypatch.setattr(slow_ranks, "time", clock)
    monkeypatch.setattr(wall_time, "time", clock)
    monkeypatch.setattr(wall_time, "_clock", wall_time.Clock(clock.now, "import"))
    # Alone, a rank compares itself with none.
    monkeypatch.setattr(slow_ranks, "find_slow", lambda of_ranks: [])
    sent = train_as_rank(clock, tmp_path / "other", data_s, forward_s, [])
    assert [block for table in sent for block in table.tolist()] == [
        [10 * data_s, 10 * forward_s, 10 * (data_s + forward_s + 1)]
    ] * (2 * BLOCKS)
    monkeypatch.setattr(slow_ranks, "find_slow", find_slow)
    capsys.readouterr()
    train_as_rank(clock, tmp_path / "mine", FAST_S, FAST_S, sent)
    said = capsys.readouterr().out
    found = record.read(tmp_path / "mine").slow_ranks
    if not cause:
        assert (found, "is slow" in said) == ([], False)
        return
    assert found == [
        {"rank": 1, "cause": cause, "step_s": SLOW_S, "others_s": FAST_S, "step": NUM_STEPS // 2}
    ]
    note = f"Note: rank 1 is slow: it {text} for 6000.0 ms in each step, the others for 1000.0 ms"
    assert said.count(note) == said.count("is slow") == 1


def test_each_run_of_several_ranks_looks_for_slow_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "rank", lambda: 1)
    for num_ranks in (1, 2):
        monkeypatch.setattr(environment, "world_size", lambda num=num_ranks: num)
        callbacks = callbacks_of_run(make_spec(tmp_path), mock.Mock(), [])
        found = [callback for callback in callbacks if isinstance(callback, SlowRanks)]
        assert [callback.run_dir for callback in found] == [tmp_path] * (num_ranks - 1)


def blocks(*forward: float) -> list[list[float]]:
    """Blocks of a rank with these seconds of forward passes, in which nothing waits for data."""
    return [[0.0, seconds, 10.0] for seconds in forward]


@pytest.mark.parametrize(
    ("of_ranks", "slow"),
    [
        ([blocks(*BLOCKS * [5.0]), blocks(*BLOCKS * [7.0])], [1]),
        ([blocks(*BLOCKS * [5.0]), blocks(*BLOCKS * [5.9])], []),
        # A single hiccup.
        ([blocks(*BLOCKS * [5.0]), blocks(5.0, 5.0, 90.0, 5.0, 5.0)], []),
        # Less than a millisecond of each step.
        ([[[0.0, 0.001, 0.02]] * BLOCKS, [[0.0, 0.005, 0.02]] * BLOCKS], []),
        # Twice as long, for which nobody waits in steps of a second.
        ([blocks(*BLOCKS * [0.1]), blocks(*BLOCKS * [0.2])], []),
        ([blocks(*BLOCKS * [seconds]) for seconds in (7.0, 5.0, 5.0, 7.0)], [0, 3]),
    ],
)
def test_noise_is_not_named(of_ranks, slow):
    assert [found.rank for found in find_slow(of_ranks)] == slow
