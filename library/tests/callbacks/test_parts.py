"""One exchange keeps what all parts have, and gives each back its own."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from library.tests.kit import fit
from samestep.callbacks.run_state import KEY, Part, RunState, Saved
from samestep.errors import ConfigError


class Counts(Part):
    def __init__(self, key: str, kept: Any) -> None:
        self.key, self.kept = key, kept
        self.loaded: list[Saved] = []

    def save(self, trainer: Any, checkpoint: Any) -> Any:
        return self.kept

    def load(self, trainer: Any, checkpoint: Any, saved: Saved) -> None:
        self.loaded.append(saved)


def trainer_with(*parts: Part) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[*parts]
    )
    trainer.state.fn = "fit"
    return trainer


def test_a_part_gets_what_it_has_kept_and_nothing_else():
    one, nothing = Counts("one", [1]), Counts("nothing", None)
    checkpoint: dict[str, Any] = {}
    RunState().on_save_checkpoint(trainer_with(one, nothing), L.LightningModule(), checkpoint)
    new, other, again = Counts("new", 0), Counts("one", 0), Counts("nothing", 0)
    trainer = trainer_with(new, other, again)
    RunState().on_load_checkpoint(trainer, L.LightningModule(), checkpoint)
    assert other.loaded == [Saved([1], [[1]], is_same_number=True)]
    assert new.loaded == again.loaded == []


@pytest.mark.parametrize(("rank", "num_ranks", "own"), [(1, 2, "b"), (1, 3, "a"), (0, 1, "a")])
def test_each_rank_gets_its_own_and_on_another_number_that_of_rank_zero(
    monkeypatch: pytest.MonkeyPatch, rank: int, num_ranks: int, own: str
):
    part = Counts("one", None)
    trainer = trainer_with(part)
    monkeypatch.setattr(L.Trainer, "world_size", num_ranks)
    monkeypatch.setattr(L.Trainer, "global_rank", rank)
    state = {"format": 1, "ranks": [{"one": "a"}, {"one": "b"}]}
    RunState().on_load_checkpoint(trainer, L.LightningModule(), {KEY: state})
    assert part.loaded == [Saved(own, ["a", "b"], is_same_number=num_ranks == 2)]


@pytest.mark.parametrize("state", [None, {"format": 0, "ranks": []}])
def test_a_checkpoint_of_another_version_is_one_message(state: Any):
    checkpoint = {} if state is None else {KEY: state}
    with pytest.raises(ConfigError, match="another version of samestep"):
        RunState().on_load_checkpoint(trainer_with(), L.LightningModule(), checkpoint)
    # Its weights can be tested.
    trainer = trainer_with()
    trainer.state.fn = "test"
    RunState().on_load_checkpoint(trainer, L.LightningModule(), checkpoint)


LIGHTNINGS = {
    "callbacks", "epoch", "global_step", "loops", "lr_schedulers", "optimizer_states",
    "pytorch-lightning_version", "state_dict",
}  # fmt: skip


def test_a_checkpoint_has_few_keys_beside_lightnings(tmp_path: Path):
    fit(tmp_path, max_epochs=1)
    content = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    ours = {"best_step", "checkpoints", "grown", "history", KEY}
    assert content.keys() == LIGHTNINGS | ours
