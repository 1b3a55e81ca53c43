"""What other people's code puts into a checkpoint, and whether it can be read again."""

import functools
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from library.tests.kit import Net, batches, check_exact, fit
from samestep.errors import ConfigError
from samestep.run.checkpoint import CheckpointError, load


class Encoder:
    """As PyTorch Forecasting's NaNLabelEncoder: an object of another library."""


class WithParts(Net):
    def __init__(self, net: Any, encoder: Any, make: Any, path: Any, options: Any, lr: Any):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Lightning, to leave out the net
            self.save_hyperparameters()


PARTS = {
    "net": torch.nn.Linear(1, 1), "encoder": Encoder(), "make": functools.partial(torch.optim.Adam),
    "path": Path("data"), "options": Namespace(width=3, sizes=(1, 2)),
    "lr": np.float64(0.5),
}  # fmt: skip


def test_hyperparameters_that_cannot_be_read_again_are_left_out(tmp_path: Path, capsys):
    fit(tmp_path, lambda: WithParts(**PARTS))
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "read again" in line]
    assert "read again: net (Linear), encoder (Encoder), make (partial). load_from" in note
    assert "self.save_hyperparameters(ignore=['net', 'encoder', 'make'])" in note
    saved = load(tmp_path / "checkpoints/last.ckpt")["hyper_parameters"]
    assert saved == {"path": "data", "options": {"width": 3, "sizes": (1, 2)}, "lr": 0.5}
    fit(tmp_path, lambda: WithParts(**PARTS), max_epochs=3)


def test_hyperparameters_of_omegaconf_are_plain(tmp_path: Path):
    OmegaConf = pytest.importorskip("omegaconf").OmegaConf

    class Configured(Net):
        def __init__(self, config: Any):
            super().__init__()
            self.save_hyperparameters(config)

    values = OmegaConf.create({"lr": 0.1, "same": "${lr}", "sizes": [1, 2]})
    fit(tmp_path, lambda: Configured(values), max_epochs=1)
    saved = load(tmp_path / "checkpoints/last.ckpt")
    assert saved["hyper_parameters"] == {"lr": 0.1, "same": 0.1, "sizes": [1, 2]}


class Odd(L.Callback):
    """Saves a value that torch does not read again, from a step on."""

    def __init__(self, since: int):
        self.since = since
        self.step = 0

    def on_train_batch_end(self, trainer, *args):
        self.step = trainer.global_step

    def state_dict(self):
        return {"best": Path("a") if self.step >= self.since else None}


def test_what_a_checkpoint_cannot_hold_is_found_before_the_first_step(tmp_path: Path):
    odd = Odd(since=0)
    with pytest.raises(ConfigError, match=r"\['Odd'\]\['best'\] is a pathlib\S*Path"):
        fit(tmp_path / "run", callbacks=lambda: [odd])
    assert odd.step == 0
    assert list(tmp_path.iterdir()) == []


def test_what_the_model_adds_and_makes_again_is_no_obstacle(tmp_path: Path, capsys):
    class Adds(Net):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["config"] = lambda: None

        def on_load_checkpoint(self, checkpoint):
            assert checkpoint["config"]() is None

    fit(tmp_path, Adds, places=[(0, 1)])
    assert "the program makes: config (function)" in capsys.readouterr().out


def test_a_later_checkpoint_that_could_not_be_read_is_not_saved(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"\['Odd'\]\['best'\] is a pathlib\S*Path"):
        fit(tmp_path, callbacks=lambda: [Odd(since=6)])
    assert load(tmp_path / "checkpoints/last.ckpt")["global_step"] == 4


class Marked(torch.Tensor):
    """As MONAI's MetaTensor: what is computed from it is one too."""

    def __deepcopy__(self, memo):
        return self.clone()


class Foreign(Net):
    """Logs subclasses of tensors, and saves numbers and arrays of NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1).as_subclass(Marked))
        self.best, self.seen = np.float32(9.0), np.zeros(3)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        # In 32 bits: as Python's number it would have other bits after it is read.
        self.best = np.float32(0.9) * self.best + np.float32(loss.item())
        self.seen[batch_idx % 3] += 1
        self.log("marked", (loss.detach() * self.scale).mean(), on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.loss(batch) * self.scale).mean())
        self.log("best", float(self.best))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = {"best": self.best, "seen": self.seen.copy()}

    def on_load_checkpoint(self, checkpoint):
        self.best, self.seen = checkpoint["mine"]["best"], checkpoint["mine"]["seen"]


def test_values_of_numpy_and_subclasses_of_tensors_continue_exactly(tmp_path: Path):
    savers: list[L.Callback] = []

    def callbacks() -> list[L.Callback]:
        # Its state has the metrics that were logged.
        savers.append(ModelCheckpoint(monitor="val_loss", save_top_k=2))
        return [savers[-1]]

    places = (0, 1), (0, 3), (1, 2)
    whole, parts = check_exact(
        tmp_path, Foreign, batches, *places, callbacks=callbacks, monitor="val_loss"
    )
    ours, theirs = parts[-1].module, whole.module
    assert type(ours.best) is np.float32
    assert ours.best == theirs.best
    np.testing.assert_array_equal(ours.seen, theirs.seen)
    assert isinstance(savers[-1].best_model_score, Marked)  # type: ignore[attr-defined]
