"""Libraries that build Lightning's Trainer themselves."""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Trainer as Imported
from lightning.pytorch.plugins import TorchCheckpointIO

import samestep
from library.tests.callbacks.test_stand_ins import OfLibrary as SavesObjects
from library.tests.kit import Killed, Net, Observer, batches, on_ranks
from samestep import ConfigError, arguments, patch_lightning
from samestep.callbacks.watchdog import Watchdog
from samestep.ranks import stopping

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False, "logger": False, "max_epochs": 2,
}  # fmt: skip


class OfLibrary(pl.Trainer):
    """As the Trainer of scvi-tools: a subclass with arguments and attributes of its own."""

    def __init__(self, mood: str, default_root_dir: str = "logs", **options: Any) -> None:
        self.mood = mood
        self.num_fits = 0
        super().__init__(default_root_dir=default_root_dir, **options)
        self._model = "its own"

    def fit(self, *args: Any, **options: Any) -> None:
        self.num_fits += 1
        super().fit(*args, **options)
        assert self._model == "its own"


class Predicts(Net):
    def predict_step(self, batch, batch_idx):
        return self.loss(batch)


@pytest.fixture(autouse=True)
def nothing_is_noted_yet(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arguments, "_noted", set())


def train(
    run_dir: Path, left: list[list[Any]], how: str = "SIGTERM", kind: type[Any] = Predicts
) -> list[Any]:
    """A program that trains two modules by a library, and starts again when it was disturbed.

    Args:
        run_dir: of both.
        left: where each of them is disturbed.
        how: of ``Observer``.
        kind: the class of the modules.
    """
    trainers: list[L.Trainer] = []
    while True:
        try:
            with patch_lightning(run_dir=run_dir, plugins=[TorchCheckpointIO()]):
                observers = [Observer(places, how) for places in left]
                return list(train_once(trainers, observers, kind))
        except (stopping.Stopped, Killed):
            stopping.uninstall()
            for callback in trainers[-1].callbacks:
                if isinstance(callback, Watchdog):
                    callback.stop()


def train_once(
    trainers: list[L.Trainer], observers: list[Observer], kind: type[Any]
) -> Iterator[Any]:
    for number, observer in enumerate(observers):
        options: Any = QUIET | {"callbacks": [observer], "num_sanity_val_steps": 0}
        trainer = OfLibrary("good", **options) if number else Imported(**options)
        trainers.append(trainer)
        model = kind()
        trainer.fit(model, batches(shuffle=True), batches(shuffle=False))
        yield model


@pytest.mark.program
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_each_trainer_of_a_library_continues_its_own_run(tmp_path: Path, how: str):
    whole = train(tmp_path / "whole", [[], []])
    parts = train(tmp_path / "parts", [[(1, 1)], [(0, 2), (1, 0)]], how)
    # Once more: all is finished, and the library goes on with the modules.
    again = train(tmp_path / "parts", [[], []])
    for module, *others in zip(whole, parts, again, strict=True):
        assert not torch.equal(module.head.weight, Net().head.weight)
        for other in others:
            torch.testing.assert_close(other.state_dict(), module.state_dict(), rtol=0, atol=0)
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["1", "2"]


def compare_on_each_rank(folder: str) -> None:
    """Modules with objects in their checkpoints; both are killed, and then stopped."""
    whole = train(Path(folder, "whole"), [[], []], kind=SavesObjects)
    places: list[list[Any]] = [[(1, 1), (1, 2)], [(0, 1), (1, 0)]]
    parts = train(Path(folder, "parts"), places, "both", SavesObjects)
    assert places == [[], []]
    for module, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(other.state_dict(), module.state_dict(), rtol=0, atol=0)
        assert other.scale.seen == {"steps": 8}
        torch.testing.assert_close(other.scale.factor, module.scale.factor, rtol=0, atol=0)


@pytest.mark.program
def test_two_ranks_of_a_library_continue_with_their_objects(tmp_path: Path):
    done = on_ranks(compare_on_each_rank, str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.program
def test_arguments_without_an_effect_are_named_once(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(Path("runs"), [[], []])
    notes = [line for line in capsys.readouterr().out.splitlines() if "no effect" in line]
    assert [note.count(" (") for note in notes] == [2, 1]
    assert "enable_checkpointing (" in notes[0]
    assert "TorchCheckpointIO (" in notes[0]
    assert "default_root_dir (the run writes to run_dir, runs/2)" in notes[1]


def test_lightning_is_patched_for_a_block_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    signature = inspect.signature(L.Trainer), inspect.signature(L.Trainer.__init__)
    theirs, mine = L.Callback(), L.Callback()
    given: dict[str, Any] = QUIET | {"callbacks": theirs}
    with patch_lightning(run_dir=tmp_path, seed=3, max_epochs=5, callbacks=[mine]) as patch:
        ours = L.Trainer(**given), OfLibrary("good", **given)
        assert (inspect.signature(pl.Trainer), inspect.signature(L.Trainer.__init__)) == signature
        assert samestep.Trainer(run_dir=tmp_path / "own", **QUIET).spec.run_dir.name == "own"
    for trainer in ours:
        assert isinstance(trainer, samestep.Trainer)
        assert trainer.spec.seed == 3
        # The library says 2.
        assert trainer.max_epochs == 5
        assert {theirs, mine} <= {*trainer.callbacks}
    assert isinstance(ours[1], OfLibrary)
    assert type(ours[1]).__name__ == "OfLibrary"
    assert [trainer.spec.run_dir.name for trainer in ours] == ["1", "2"]
    assert patch.num_trainers == 2
    assert type(L.Trainer(**QUIET)) is L.Trainer
    monkeypatch.chdir(tmp_path)
    one_line = patch_lightning(run_dir="runs")
    try:
        # As a library may do before it builds its Trainer.
        monkeypatch.chdir(Path.cwd().parent)
        trainer = Imported(**QUIET)
        assert isinstance(trainer, samestep.Trainer)
        assert trainer.spec.run_dir == tmp_path / "runs/1"
    finally:
        one_line.undo()


@pytest.mark.program
def test_a_module_that_is_given_is_evaluated_with_the_weights_that_it_has(tmp_path: Path):
    model = Predicts()
    with torch.no_grad():
        model.head.weight.fill_(0.25)
    theirs: Any = L.Trainer(**QUIET).predict(model, batches(shuffle=False))
    with patch_lightning(run_dir=tmp_path / "runs"):
        found = [L.Trainer(**QUIET).predict(model, batches(shuffle=False))]
        assert not (tmp_path / "runs").exists()
        trained, trainer = Predicts(), L.Trainer(**QUIET)
        trainer.fit(trained, batches(), batches(shuffle=False))
        trained.load_state_dict(model.state_dict())
        found.append(trainer.predict(trained, batches(shuffle=False)))
    for ours in found:
        assert ours is not None
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_second_lightning_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pytorch_lightning", ModuleType("pytorch_lightning"))
    with pytest.raises(ConfigError, match="pytorch_lightning was imported before samestep"):
        patch_lightning(run_dir=tmp_path)
