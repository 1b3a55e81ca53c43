import csv
import errno
import os
import shutil
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch.utils.data import DataLoader

from samestep.run.files import WriteError
from samestep.run.history import History
from samestep.run.metrics import read_history

# A run that continues finds its own checkpoints.
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* not empty:UserWarning")


class Tiny(L.LightningModule):
    """Logs the way the classifier does: once per epoch, in its own hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("fit_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("of_each_batch", 1.0, on_step=True, on_epoch=False)

    test_step = validation_step

    def on_train_epoch_end(self):
        self._log("train")
        self.log("train/samples_per_second", 1 / 3 + self.current_epoch)

    def on_validation_epoch_end(self):
        self._log("val")

    def on_test_epoch_end(self):
        self._log("test")

    def _log(self, stage):
        self.log(f"{stage}/loss", self.layer(torch.ones(2)).square().sum().detach())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Dies(L.Callback):
    """Ends the run in epoch 2, and keeps metrics.csv as a killed process would leave it."""

    def die(self, trainer, *args):
        if trainer.current_epoch == 2:
            source = Path(trainer.default_root_dir) / "metrics.csv"
            shutil.copy(source, source.with_name("killed.csv"))
            raise RuntimeError("killed")


class DiesAfterTheCheckpoint(Dies, Checkpoint):
    on_train_epoch_end = Dies.die  # checkpoints are called in order, this one last


class DiesAfterValidation(Dies):
    on_validation_end = Dies.die


def fit(run_dir: Path, *callbacks: L.Callback, max_epochs: int = 3) -> History:
    L.seed_everything(0, verbose=False)
    images = DataLoader(torch.arange(16.0).reshape(8, 2) / 16, batch_size=2)
    history = History(run_dir)
    last = ModelCheckpoint(run_dir, "last", monitor=None, enable_version_counter=False)
    best = ModelCheckpoint(run_dir, "best", "val/loss", mode="max", enable_version_counter=False)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=max_epochs, default_root_dir=run_dir,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=0,
        logger=[history], callbacks=[history, best, last, *callbacks],
    )  # fmt: skip
    checkpoint = run_dir / "last.ckpt"
    trainer.fit(Tiny(), images, images, ckpt_path=checkpoint if checkpoint.exists() else None)
    trainer.test(trainer.lightning_module, images, run_dir / "best.ckpt", verbose=False)
    return history


def rows(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    fit(run_dir)
    return run_dir


def test_there_is_one_row_per_step_and_each_figure_once(undisturbed: Path):
    table = rows(undisturbed)
    assert [(row["epoch"], row["step"]) for row in table] == [
        ("0", "3"), ("1", "7"), ("2", "11"), ("3", "12")
    ]  # fmt: skip
    assert all(row["train/loss"] and row["val/loss"] for row in table[:3])
    assert [bool(row["test/loss"]) for row in table] == [False, False, False, True]
    # Figures are read back exactly.
    best = torch.load(undisturbed / "best.ckpt", weights_only=True)
    assert best["global_step"] < 12  # testing it leaves the rows of later steps alone
    layer = best["state_dict"]
    loss = (layer["layer.weight"].sum() + layer["layer.bias"]).square().item()
    assert read_history(undisturbed)[-1]["test/loss"] == loss


def test_final_metrics_are_the_newest_of_each_and_no_speeds(undisturbed: Path):
    table = rows(undisturbed)
    history = History(undisturbed)
    history.log_metrics({"lrap": 0.5}, 99)  # a metric, and no learning rate
    history.log_metrics({"epoch": 0, "step/lr": 0.1, "lr": 0.1, "lr-Adam/pg1": 0.1}, 99)
    assert history.last() == {"lrap": 0.5}
    history.rows = {int(row["step"]): row for row in read_history(undisturbed)}
    assert history.last() == {
        "fit_loss": float(table[2]["fit_loss"]),
        "test/loss": float(table[3]["test/loss"]),
        "train/loss": float(table[2]["train/loss"]),
        "val/loss": float(table[2]["val/loss"]),
    }
    assert table[2]["train/samples_per_second"]


@pytest.mark.parametrize(
    ("death", "killed"), [(DiesAfterTheCheckpoint, True), (DiesAfterValidation, False)]
)
def test_an_interrupted_run_leaves_the_same_file(
    tmp_path: Path, undisturbed: Path, death: type[Dies], killed: bool
):
    with pytest.raises(RuntimeError, match="killed"):
        fit(tmp_path, death())
    if killed:
        (tmp_path / "killed.csv").replace(tmp_path / "metrics.csv")
    fit(tmp_path)
    assert (tmp_path / "metrics.csv").read_text() == (undisturbed / "metrics.csv").read_text()


def test_rows_after_the_checkpoint_are_dropped(tmp_path: Path):
    with pytest.raises(RuntimeError, match="killed"):
        fit(tmp_path, DiesAfterValidation())
    table = rows(tmp_path)
    assert [row["step"] for row in table] == ["3", "7", "11"]  # 11 is beyond last.ckpt, at 8
    fit(tmp_path, max_epochs=2)
    assert [row["step"] for row in rows(tmp_path)] == ["3", "7", "8"]


def test_a_flipped_bit_in_the_file_reaches_nothing(tmp_path: Path, undisturbed: Path):
    with pytest.raises(RuntimeError, match="killed"):
        fit(tmp_path, DiesAfterTheCheckpoint())
    path = tmp_path / "metrics.csv"
    path.write_text(path.read_text().replace("0.0", "0.4"))
    fit(tmp_path)
    assert path.read_text() == (undisturbed / "metrics.csv").read_text()


def test_a_full_disk_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("samestep.run.history.write_text", refuse)
    history = History(tmp_path)
    with pytest.raises(WriteError, match=r"metrics.csv cannot be written: No space .* Free"):
        history.finalize("success")
    history.finalize("failed")  # the error that came first is on its way


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "1")
    history = History(tmp_path)
    history.log_metrics({"train/loss": 1.0}, step=0)
    history.finalize("success")
    assert list(tmp_path.iterdir()) == []


class TwoSteps(Tiny):
    """Two optimizers, as a GAN has them: two steps for each batch, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.log("fit_loss", float(batch_idx), on_step=False, on_epoch=True)
        for optimizer in self.optimizers() if batch_idx % 2 else ():
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch).square().mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(3)]


def test_rows_count_batches_where_a_batch_has_other_numbers_of_steps(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(globals(), "Tiny", TwoSteps)
    for folder, epochs in (("whole", [3]), ("parts", [1, 3])):
        for max_epochs in epochs:
            (tmp_path / folder).mkdir(exist_ok=True)
            fit(tmp_path / folder, max_epochs=max_epochs)
    whole, parts = (rows(tmp_path / folder) for folder in ("whole", "parts"))
    assert [row["step"] for row in whole] == ["3", "7", "11", "12"]
    assert whole == [row for row in parts if row in whole]
