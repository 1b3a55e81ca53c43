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
from omegaconf import OmegaConf

from samestep.errors import ConfigError
from samestep.run.checkpoint import CheckpointError, load
from tests.samestep.callbacks.tiny import Tiny, fit

SCORES = [0.1, 0.2, 0.3]


class Encoder:
    """As PyTorch Forecasting's NaNLabelEncoder: an object of another library."""


class WithParts(Tiny):
    def __init__(self, net: Any, encoder: Any, make: Any, path: Any, options: Any, lr: Any):
        super().__init__(SCORES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Lightning, to leave out the net
            self.save_hyperparameters()


PARTS = {
    "net": torch.nn.Linear(1, 1), "encoder": Encoder(), "make": functools.partial(torch.optim.Adam),
    "path": Path("data"), "options": Namespace(width=3, sizes=OmegaConf.create([1, 2])),
    "lr": np.float64(0.5),
}  # fmt: skip


def test_hyperparameters_that_cannot_be_read_again_are_left_out(tmp_path: Path, capsys):
    trainer = fit(tmp_path, WithParts(**PARTS), max_epochs=2)
    assert trainer.global_step == 8
    (note,) = capsys.readouterr().out.splitlines()
    assert "read again: net (Linear), encoder (Encoder), make (partial). load_from" in note
    assert "self.save_hyperparameters(ignore=['net', 'encoder', 'make'])" in note
    saved = load(tmp_path / "checkpoints/last.ckpt")["hyper_parameters"]
    assert saved == {"path": "data", "options": {"width": 3, "sizes": [1, 2]}, "lr": 0.5}
    fit(tmp_path, WithParts(**PARTS), max_epochs=3, ckpt="last.ckpt")


def test_hyperparameters_of_omegaconf_are_plain(tmp_path: Path):
    class Configured(Tiny):
        def __init__(self, config: Any):
            super().__init__(SCORES)
            self.save_hyperparameters(config)

    fit(tmp_path, Configured(OmegaConf.create({"lr": 0.1, "same": "${lr}"})), max_epochs=1)
    saved = load(tmp_path / "checkpoints/last.ckpt")
    assert saved["hyper_parameters"] == {"lr": 0.1, "same": 0.1}


class Odd(L.Callback):
    """Saves a value that torch does not read again, from a step on."""

    def __init__(self, since: int):
        self.since = since
        self.step = 0

    def on_train_batch_end(self, trainer, *args):
        self.step = trainer.global_step

    def state_dict(self):
        return {"best": np.float64(0.5) if self.step >= self.since else None}


def test_what_a_checkpoint_cannot_hold_is_found_before_the_first_step(tmp_path: Path):
    odd = Odd(since=0)
    with pytest.raises(ConfigError, match=r"\['Odd'\]\['best'\] is a numpy.float64"):
        fit(tmp_path, Tiny(SCORES), odd)
    assert odd.step == 0
    assert list(tmp_path.glob("checkpoints/*")) == []


def test_so_is_what_the_model_adds(tmp_path: Path):
    class Adds(Tiny):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["config"] = lambda: None

    with pytest.raises(ConfigError, match="could not be read again"):
        fit(tmp_path, Adds(SCORES))


def test_a_later_checkpoint_that_could_not_be_read_is_not_saved(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"\['Odd'\]\['best'\] is a numpy.float64"):
        fit(tmp_path, Tiny(SCORES), Odd(since=6))
    assert load(tmp_path / "checkpoints/last.ckpt")["global_step"] == 4
