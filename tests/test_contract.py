"""docs/contract.md, executed, and the table of docs/tasks.md, stopped, killed and continued."""

import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, final_metrics, run, run_ranks
from tests.test_tasks import write_files

pytestmark = pytest.mark.program

PAGE = (ROOT / "docs" / "contract.md").read_text()
HOUSES = [
    "data=houses", "data.file=houses.csv", "model=price", "model.lr=0.001",
    "callbacks.checkpoints.monitor=val_loss", "callbacks.checkpoints.mode=min",
]  # fmt: skip
EPOCHS = ["trainer.max_epochs=3", "trainer.accelerator=cpu"]
PLAIN = '''
"""Written as in Lightning's documentation: ordinary DataLoaders, self.log, nothing of Samestep."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class PlainData(L.LightningDataModule):
    def __init__(self, batch_size: int = 8, num_workers: int = 0):
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers

    def setup(self, stage: str):
        generator = torch.Generator().manual_seed(42)
        x = torch.randn(160, 5, generator=generator)
        whole = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(160))
        self.train, self.val = random_split(whole, [128, 32], generator=generator)

    def train_dataloader(self):
        return DataLoader(
            self.train, batch_size=self.batch_size, shuffle=True, num_workers=self.num_workers
        )

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)


class PlainModel(L.LightningModule):
    def __init__(self, lr: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        layers = nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)
        self.layer = nn.Sequential(*layers)

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        loss = nn.functional.mse_loss(self.layer(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y, _ = batch
        self.log("val_loss", nn.functional.mse_loss(self.layer(x), y), sync_dist=True)

    def test_step(self, batch, batch_idx):
        x, y, _ = batch
        self.log("test_loss", nn.functional.mse_loss(self.layer(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
'''
(PLAIN_COMMAND, _) = re.findall(r"^    python train\.py (data=plain .*)$", PAGE, re.M)
PLAIN_RUN = [*PLAIN_COMMAND.split(), *EPOCHS]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the files of the pages, and a plain module beside them."""
    root = tmp_path_factory.mktemp("contract") / "project"
    root.mkdir()
    for name in ("src", "configs", "scripts"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", root)
    for name, text in re.findall(r"^`(\S+)`:\n\n```\w+\n(.*?)^```$", PAGE, re.M | re.S):
        (root / name).write_text(text)
    write_files(root)
    (root / "src/project/plain.py").write_text(PLAIN)
    return root


def train(
    copy: Path, run_id: str, *overrides: str, fault: str = "", nodes: Sequence[int] = ()
) -> subprocess.CompletedProcess[str]:
    """Train in the copy, with a ``Signaller`` that keeps the weights in ``seen/<run_id>``."""
    node = "+callbacks.signaller"
    signaller = [f"{node}._target_=tests.signaller.Signaller", f"{node}.dirpath=seen/{run_id}"]
    path = f"{copy / 'src'}:{ROOT}"
    return run_ranks(
        "train.py", *overrides, *signaller, nodes=nodes, cwd=copy, RUN_ID=run_id, PYTHONPATH=path,
        SIGNAL_AT=fault or "-1 0 0 rank",
    )  # fmt: skip


def weights(copy: Path, run_id: str, rank: int = 0) -> dict[str, torch.Tensor]:
    return torch.load(copy / f"seen/{run_id}/weights-{rank}.pt")


@pytest.fixture(scope="module")
def reference(copy: Path) -> dict[str, torch.Tensor]:
    """Weights of the example, trained in one process without an interruption."""
    done = train(copy, "reference", *HOUSES, *EPOCHS, "callbacks.progress.unit=houses")
    assert done.returncode == 0, done.stderr
    assert "ordinary DataLoader" not in done.stdout
    assert "test_loss" in done.stdout
    assert "houses/s" in done.stdout
    return weights(copy, "reference")


def test_the_example_is_stopped_and_killed_and_continues_bit_by_bit(copy: Path, reference):
    command = [*HOUSES, *EPOCHS, "callbacks.checkpoints.every_s=1e-9", "report=false"]
    for step, signum, code in ((15, signal.SIGTERM, 143), (25, signal.SIGKILL, -9)):
        ended = train(copy, "ended", *command, fault=f"{step} {signum:d} 0 rank")
        assert ended.returncode == code, ended.stderr
        (copy / "seen/ended/done-0").unlink()  # one signal a process
    continued = train(copy, "ended", *command)
    assert continued.returncode == 0, continued.stderr
    assert continued.stdout.startswith("Continuing")
    ours = weights(copy, "ended")
    assert all(torch.equal(ours[key], reference[key]) for key in reference)
    ours, expected = (final_metrics(copy / f"runs/{run_id}") for run_id in ("ended", "reference"))
    assert ours == expected


def seen(copy: Path, run_id: str, rank: int) -> list[list[int]]:
    """Ids that a rank was shown, a list per batch, of the plain module."""
    lines = (copy / f"seen/{run_id}/seen-{rank}.txt").read_text().splitlines()
    return [[int(i) for i in line.partition(" ")[2].strip("[]").split(",")] for line in lines]


def test_plain_lightning_is_shared_out_stops_and_continues(copy: Path):
    command = [*PLAIN_RUN, "data.num_workers=1"]
    stopped = train(copy, "plain", *command, fault=f"11 {signal.SIGTERM:d} 1 rank", nodes=(2,))
    assert stopped.returncode == 143, stopped.stderr
    assert stopped.stdout.count("ordinary DataLoader") == 1
    last = torch.load(copy / "runs/plain/checkpoints/last.ckpt", weights_only=True)
    assert last["global_step"] == 12  # of 24
    continued = train(copy, "plain", *command, nodes=(2,))
    assert continued.returncode == 0, continued.stderr
    assert (copy / "runs/plain/metrics.json").exists()
    last = torch.load(copy / "runs/plain/checkpoints/last.ckpt", weights_only=True)
    assert last["global_step"] == 24  # 3 epochs of 128 samples, 8 on each of 2 ranks
    first_epoch = [seen(copy, "plain", rank)[:8] for rank in (0, 1)]
    ids = [i for rank in first_epoch for batch in rank for i in batch]
    assert len(ids) == len(set(ids)) == 128, "each sample once, on one rank"
    ours, theirs = weights(copy, "plain"), weights(copy, "plain", 1)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_plain_model_without_a_test_step_finishes_with_its_metrics(copy: Path):
    (copy / "src/project/untested.py").write_text(
        "import lightning as L\nfrom project.plain import PlainModel\n\n\n"
        "class Untested(PlainModel):\n    test_step = L.LightningModule.test_step\n"
    )
    model = "model._target_=project.untested.Untested"
    done = train(copy, "untested", *PLAIN_RUN, model, "trainer.max_epochs=1")
    assert done.returncode == 0, done.stderr
    assert "nothing is tested" in done.stdout
    # The summary names what there is.
    assert "untested/report.html\n" in done.stdout
    assert "predict" not in done.stdout
    (line,) = re.findall(r"^  (samestep evaluate) runs/untested$", done.stdout, re.M)
    for options, exit_code in ([], 0), (["--split", "test"], 2):
        done = run("-m", *line.split(), "runs/untested", *options, cwd=copy)
        assert done.returncode == exit_code, done.stderr
    assert done.stderr.startswith("error: --split test: No `test_step()` method defined")
    assert final_metrics(copy / "runs/untested").keys() == {"train_loss", "val_loss"}


def test_a_monitor_that_plain_lightning_does_not_log_is_one_message(copy: Path):
    """That of the checkpoints: tests/test_command_lines.py."""
    words = ["callbacks=early_stopping", "callbacks.early_stopping.monitor=vall_loss"]
    done = train(copy, "no-monitor", *PLAIN_RUN, *words)
    assert done.returncode == 2
    assert "val_loss" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (copy / "runs/no-monitor").exists()
