from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from library.tests.callbacks.tiny import Tiny, fit, signal_came
from library.tests.kit import Killed
from samestep.errors import ConfigError
from samestep.run import copies
from samestep.run.checkpoint import load

pytestmark = pytest.mark.filterwarnings(
    "ignore:Be aware that when using `ckpt_path`",
    "ignore:You're resuming from a checkpoint that ended before",
)


class Batches(L.Callback):
    """Lets a signal come before the batch that it is told, and notes those that were trained."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop = stop
        self.trained: list[tuple[int, int]] = []

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        if 4 * trainer.current_epoch == self.stop:
            signal_came()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.trained.append((trainer.current_epoch, batch_idx))
        if 4 * trainer.current_epoch + batch_idx + 1 == self.stop:
            signal_came()


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "val_check_interval": 2}])
def test_a_run_stopped_as_a_batch_begins_takes_each_batch_once(
    tmp_path: Path, options: dict[str, int]
):
    whole, model, trained = Batches(), Tiny([0.5]), []
    fit(tmp_path / "whole", model, whole, **options)
    for stop in (0, 2, 4, 8, 10, None):
        part, again = Batches(stop), Tiny([0.5])
        ckpt = "last.ckpt" if (tmp_path / "cut/checkpoints/last.ckpt").exists() else None
        ends = nullcontext() if stop is None else pytest.raises(SystemExit)
        with ends:
            trainer = fit(tmp_path / "cut", again, part, ckpt=ckpt, **options)
        trained += part.trained
    assert trained == whole.trained
    assert trainer.global_step == 12 // options.get("accumulate_grad_batches", 1)
    assert torch.equal(model.layer.weight, again.layer.weight)


def test_it_saves_within_an_epoch_when_it_is_time(tmp_path: Path):
    class Ends(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            if batch_idx == 2:
                raise Killed

    with pytest.raises(Killed):
        fit(tmp_path, Tiny([0.5]), Ends(), every_s=0)
    checkpoint = load(tmp_path / "checkpoints/last.ckpt")
    assert checkpoint["global_step"] == 2
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    assert progress["current"]["ready"] == progress["current"]["completed"] == 2


def test_nodes_that_do_not_see_the_directory_get_each_file_that_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sent = []
    monkeypatch.setattr(copies, "replicate", lambda run_dir, names: sent.append((run_dir, *names)))
    fit(tmp_path, Tiny([0.1, 0.3, 0.2]), every_n_epochs=2)
    always = (tmp_path, "checkpoints/last.ckpt")
    assert sent == [
        (*always, "checkpoints/best.ckpt"),
        (*always, "checkpoints/best.ckpt", "checkpoints/epoch-0002.ckpt"),
        always,
    ]


def test_a_checkpoint_of_another_model_is_one_message(tmp_path: Path):
    fit(tmp_path, Tiny([0.5]), max_epochs=1)
    wider = Tiny([0.5])
    wider.layer = torch.nn.Linear(3, 1)
    with pytest.raises(ConfigError, match=r"layer.weight has the shape \[1, 2\] instead of \[1,"):
        fit(tmp_path, wider, ckpt="last.ckpt")


def test_a_run_that_was_out_of_time_goes_on_with_more_of_it(tmp_path: Path):
    steps = []
    for attempt, limit in enumerate(
        [timedelta(microseconds=1), timedelta(microseconds=2), timedelta(hours=1)]
    ):
        ckpt = "last.ckpt" if attempt else None
        steps.append(fit(tmp_path, Tiny([0.5]), max_time=limit, ckpt=ckpt).global_step)
    # The first epoch was cut after one step, and the two others were trained with the new limit.
    assert steps == [1, 1, 9]


def test_a_run_that_ended_early_goes_on_where_its_new_settings_let_it(tmp_path: Path):
    def stopping(patience: int, **settings: float) -> EarlyStopping:
        return EarlyStopping("val/score", patience=patience, mode="max", **settings)

    ckpt = None
    for callbacks, limit, epochs in [
        ([stopping(1)], 9, 2), ([stopping(1)], 9, 2), ([stopping(1, min_delta=-0.1)], 3, 3),
        ([stopping(1)], 9, 4), ([stopping(3)], 9, 6), ([], 9, 9),
    ]:  # fmt: skip
        trainer = fit(tmp_path, Tiny([0.5]), *callbacks, max_epochs=limit, ckpt=ckpt)
        assert trainer.current_epoch == epochs
        ckpt = "last.ckpt"


def test_a_run_that_ended_itself_has_ended(tmp_path: Path):
    class Ends(L.Callback):
        def on_train_batch_end(self, trainer, *args) -> None:
            trainer.should_stop = trainer.global_step == 4

    for ckpt in (None, "last.ckpt"):
        assert fit(tmp_path, Tiny([0.5]), Ends(), ckpt=ckpt).current_epoch == 1
