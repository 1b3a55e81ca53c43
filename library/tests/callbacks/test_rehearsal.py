"""A run that is stopped computes its next step once, so that the next start can compare it."""

from pathlib import Path

import lightning as L
import pytest
import torch

from library.tests.kit import Net, batches, check_exact, fit

COMPUTED: list[tuple[int, int]] = []
STARTED: list[tuple[int, int]] = []
ENDED: list[tuple[int, int]] = []
"""Steps of all processes of a run, which no checkpoint holds."""


class Counts(Net):
    def training_step(self, batch, batch_idx):
        COMPUTED.append((self.current_epoch, batch_idx))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        ENDED.append((self.current_epoch, batch_idx))


@pytest.fixture(autouse=True)
def forget():
    COMPUTED.clear()
    STARTED.clear()
    ENDED.clear()


STEPS = [(epoch, batch) for epoch in range(2) for batch in range(4)]


class Watches(L.Callback):
    """Of the user: what it writes is written once for each step."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        STARTED.append((trainer.current_epoch, batch_idx))


def test_the_next_step_is_computed_and_not_taken(tmp_path: Path, capsys):
    check_exact(tmp_path, Counts, batches, (0, 1), callbacks=lambda: [Watches()])
    assert STARTED == STEPS + STEPS
    whole, parts = COMPUTED[:8], COMPUTED[8:]
    assert whole == STEPS
    assert parts == [*STEPS[:3], *STEPS[2:]]
    assert ENDED == STEPS + STEPS
    assert "Note: " not in capsys.readouterr().out


FACTOR = [1.0]
"""What no checkpoint can know: a variable of the module."""


class Depends(Net):
    def training_step(self, batch, batch_idx):
        return FACTOR[0] * super().training_step(batch, batch_idx)

    def on_train_start(self):
        FACTOR[0] = 1.0

    def on_train_epoch_start(self):
        FACTOR[0] = 1.0 + self.current_epoch


def test_what_no_checkpoint_holds_shows_at_the_next_start(tmp_path: Path, capsys):
    fit(tmp_path, Depends, batches, [(1, 1)])
    assert "step 7 is repeated on the same samples with another loss" in capsys.readouterr().out


def test_an_error_in_it_ends_nothing(tmp_path: Path, capsys):
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            if (self.current_epoch, batch_idx) == (0, 2) and self.trainer.ckpt_path is None:
                raise ValueError
            return super().training_step(batch, batch_idx)

    fit(tmp_path, Fails, batches, [(0, 1)])
    assert "Stopped by SIGTERM after step 2; saved." in capsys.readouterr().out


def lbfgs(module):
    return torch.optim.LBFGS(module.parameters(), max_iter=3)


def test_an_optimizer_may_ask_for_several_losses(tmp_path: Path, capsys):
    fit(tmp_path, lambda: Net(lbfgs), batches, [(0, 1), (1, 2)])
    assert "Note: " not in capsys.readouterr().out
