"""Repeated steps are compared: what differs is said once, and nothing is said otherwise.

Programs that are really killed, with causes as people plant them: labs/receipts.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader, IterableDataset

from library.tests import kit
from library.tests.kit import Net, Normalized, batches, fit, on_ranks
from samestep.callbacks.checkpoints import Checkpoints
from samestep.callbacks.loss_guard import LossGuard
from samestep.plugins import receipt_files as receipts
from samestep.plugins.receipt_files import Receipt
from samestep.plugins.receipts import COPY_EVERY, LossesOnDevice, Pending, Receipts, tolerance_of
from samestep.ranks.compat import callbacks_of
from samestep.run import record

pytestmark = pytest.mark.filterwarnings("ignore")
KILLED = (1, 2)
NOTE = "is repeated"
CODE = os.path.relpath(kit.__file__)


def repeats(run_dir: Path) -> list[dict[str, Any]]:
    return [dict(repeat) for repeat in record.read(run_dir).repeats]


class Adversarial(Net):
    """Two optimizers, of which one takes two steps in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for number, optimizer in enumerate(self.optimizers()):
            for _ in range(1 + number):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(p.parameters(), 0.01) for p in (self.body, self.head)]


class Untold(Adversarial):
    """Computes its gradients without Lightning."""

    def manual_backward(self, loss):
        loss.backward()


class Lbfgs(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Reader(Net):
    """Reads its batches itself."""

    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class Bad(Net):
    """The loss of a batch in each epoch is nan; its step is not taken."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 1 else loss


class Skipping(Net):
    """Has batches without a loss."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class Keeping(Net):
    """Averages losses in the memory of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.average: Any = None

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.average is None:
            self.average = loss.detach()
        else:
            self.average.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return loss


class Saver(L.Callback):
    """Saves in the middle of a batch, in the first of two processes."""

    num_processes = 0

    def on_fit_start(self, trainer, pl_module):
        Saver.num_processes += 1

    def on_before_backward(self, trainer, pl_module, loss):
        if Saver.num_processes % 2:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "other.ckpt")


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(16.0)[:, None]


STYLES: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, Any]]] = {
    "plain": (Net, batches, {}),
    "buffers and dropout": (Normalized, batches, {}),
    "two optimizers": (Adversarial, batches, {}),
    "gradients of its own": (Untold, batches, {}),
    "L-BFGS": (Lbfgs, batches, {}),
    "dataloader_iter": (Reader, batches, {}),
    "nan": (Bad, batches, {"callbacks": lambda: [LossGuard(9)]}),
    "no loss": (Skipping, batches, {}),
    "a loss that is changed later": (Keeping, batches, {}),
    "a save within a batch": (Net, batches, {"callbacks": lambda: [Saver()]}),
    "accumulation": (Net, batches, {"accumulate_grad_batches": 3}),
    "another accumulation in each epoch": (
        Net, batches, {"callbacks": lambda: [GradientAccumulationScheduler({0: 3, 1: 2})]},
    ),
    "validation within an epoch": (Net, batches, {"val_check_interval": 2}),
    "a part of an epoch": (Net, lambda: batches(32), {"limit_train_batches": 0.5}),
    "max_steps": (Net, batches, {"max_steps": 7, "max_epochs": -1}),
    "a DataLoader": (Net, lambda: DataLoader(torch.arange(16.0)[:, None], 4, shuffle=True), {}),
    "a stream": (Net, lambda: DataLoader(Stream(), 4), {}),
    "several loaders": (Net, lambda: {"a": batches(), "b": batches(12, 3)}, {}),
}  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
def test_nothing_is_said_where_nothing_differs(
    style: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    model, data, options = STYLES[style]
    fit(tmp_path / "run", model, data, [KILLED], how="SIGKILL", **options)
    assert NOTE not in capsys.readouterr().out
    (repeat,) = repeats(tmp_path / "run")
    # All but the last one, whose end the process has not seen.
    assert (repeat["result"], repeat["batches"], repeat["note"]) == ("equal", KILLED[1], "")


weight = 1.0


class Lossy(Net):
    """Its loss depends on a global variable that training changes."""

    def training_step(self, batch, batch_idx):
        global weight
        weight += 0.01
        return super().training_step(batch, batch_idx) * weight


class NewProcess(L.Callback):
    """Gives the global variable its first value, as a new process does."""

    def on_fit_start(self, trainer, pl_module):
        global weight
        weight = 1.0


def fit_lossy(run_dir: Path, *places: Any, **options: Any) -> None:
    fit(run_dir, Lossy, batches, places, callbacks=lambda: [NewProcess()], **options)


def test_the_first_difference_is_said_once_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    run_dir = tmp_path / "run"
    fit_lossy(run_dir, KILLED, how="SIGKILL")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if NOTE in line]
    (repeat,) = repeats(run_dir)
    assert line == f"Note: {repeat['note']}. `samestep verify -- <command>` finds it"
    assert repeat["note"].startswith("step 5 is repeated on the same samples with another loss, ")
    assert repeat["note"].endswith(": something that training changes is not in the checkpoint")
    assert (repeat["step"], repeat["batches"], repeat["result"]) == (5, 1, "different")


@pytest.mark.parametrize("how", ["config", "code", "ranks", "machine", "damaged"])
def test_what_is_not_comparable_is_not_compared(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    run_dir = tmp_path / "run"
    path = run_dir / receipts.FILE

    def change(trainer: Any, pl_module: Any) -> None:
        """Change a fact in the file, as if the process before had had it."""
        if NewProcess.num_fits == 1:
            return
        found = receipts.read(path)
        assert found is not None
        facts, known = found
        match how:
            case "config":
                facts.run["configuration"] += 1
            case "code":
                facts.code[CODE] += 1
            case "ranks":
                facts.run["number of ranks"] = 2
            case "machine":
                facts.machine["cpu"] = "another"
                known = [r._replace(loss=(r.loss or 0) * (1 + 1e-6)) for r in known]
        receipts.Journal(path, facts, known)
        if how == "damaged":
            path.write_bytes(path.read_bytes()[5:])

    class Changing(NewProcess):
        def on_train_start(self, trainer, pl_module):
            change(trainer, pl_module)

        def on_fit_start(self, trainer, pl_module):
            NewProcess.num_fits += 1
            super().on_fit_start(trainer, pl_module)

    NewProcess.num_fits = 0
    model = Net if how in ("machine", "code") else Lossy
    fit(run_dir, model, batches, [KILLED], how="SIGKILL", callbacks=lambda: [Changing()])
    said = capsys.readouterr().out
    assert NOTE not in said
    line = f"Note: this code has changed since the run was interrupted: {CODE}\n"
    assert (line in said) == (how == "code")
    found = [(repeat["result"], repeat["note"]) for repeat in repeats(run_dir)]
    expected = {
        "config": [("not compared", "another configuration")],
        "code": [("equal", "")],
        "ranks": [("not compared", "another number of ranks")],
        "machine": [("equal within rounding", "")],
    }
    assert found == expected.get(how, [])


def test_a_run_that_starts_over_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture):
    fit_lossy(tmp_path / "run", (0, 2), how="SIGKILL", seed=1)
    assert NOTE not in capsys.readouterr().out
    assert repeats(tmp_path / "run") == []


def test_steps_behind_an_older_checkpoint_are_compared_too(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    run_dir = tmp_path / "run"

    class Damaging(L.Callback):
        num_fits = 0

        def setup(self, trainer, pl_module, stage):
            Damaging.num_fits += 1

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if Damaging.num_fits == 1 and (trainer.current_epoch, batch_idx) == (2, 1):
                # A thread may still be writing what the epoch has saved.
                for callback in callbacks_of(trainer, Checkpoints):
                    callback._commit(trainer)
                path = run_dir / "checkpoints/last.ckpt"
                path.write_bytes(path.read_bytes()[:-9])

    options = {"how": "SIGKILL", "callbacks": lambda: [Damaging()], "max_epochs": 3}
    fit(run_dir, Net, batches, [(2, 2)], **options)
    assert NOTE not in capsys.readouterr().out
    (repeat,) = repeats(run_dir)
    # The second epoch, and two batches of the third.
    assert (repeat["result"], repeat["step"], repeat["batches"]) == ("equal", 5, 6)


def run_with_a_hidden_state_of_the_last_rank(folder: str) -> None:
    class OfLastRank(Lossy):
        def training_step(self, batch, batch_idx):
            if self.global_rank == 0:
                return Net.training_step(self, batch, batch_idx)
            return super().training_step(batch, batch_idx)

    callbacks = {"callbacks": lambda: [NewProcess()]}
    fit(Path(folder), OfLastRank, batches, [KILLED], how="SIGKILL", **callbacks)


@pytest.mark.program
def test_a_state_of_another_rank_shows_in_the_gradient(tmp_path: Path):
    done = on_ranks(run_with_a_hidden_state_of_the_last_rank, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(NOTE) == 1
    (repeat,) = repeats(tmp_path / "run")
    assert repeat["note"].startswith(
        "step 5 is repeated on the same samples with the same loss and another gradient: "
    )


def test_receipts_are_in_no_checkpoint_and_no_config(tmp_path: Path):
    (part,) = fit(tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert receipts.FILE in names
    checkpoint = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=False)
    assert "Receipts" not in json.dumps(sorted(map(str, checkpoint["callbacks"])))
    _, found = receipts.read(tmp_path / "run" / receipts.FILE)
    known = [receipt for receipt in found if not receipt.is_of_validation]
    assert [r.place for r in found if r not in known] == [(0, 4), (1, 4)]
    assert [r.place for r in known] == [(epoch, batch) for epoch in (0, 1) for batch in range(4)]
    assert all(r.samples and r.loss is not None and r.gradient is not None for r in known)
    assert callbacks_of(part.trainer, Receipts)


class Event:
    """Of a GPU that has reached as many events as it is told."""

    num_reached = 0
    num_made = 0
    num_waits = 0

    def __init__(self) -> None:
        Event.num_made += 1
        self.number = Event.num_made

    def record(self, stream: Any) -> None:
        """Nothing."""

    def query(self) -> bool:
        return self.number <= Event.num_reached

    def synchronize(self) -> None:
        Event.num_waits += 1


def test_losses_on_a_gpu_are_copied_together_and_nothing_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
):
    """By a stand-in for the events of CUDA: no GPU is needed."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "empty", lambda num, dtype, pin_memory: zeros(num, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    arrived: list[Pending] = []
    clock = SimpleNamespace(perf_counter=lambda: 0.0)
    monkeypatch.setattr("samestep.plugins.receipts.time", clock)
    device = LossesOnDevice()
    for step in range(1, 2 * COPY_EVERY + 11):
        pending = Pending(Receipt(0, step, 1, None, None), step)
        device.add(pending, torch.tensor(step / 2, dtype=torch.float64))
        arrived += device.take_arrived()
        # The device is slow, and then has done all it got.
        Event.num_reached = 0 if step < COPY_EVERY + 20 else Event.num_made
    assert Event.num_waits == 0
    assert Event.num_made == 2
    # Steps that take long: none waits for others.
    clock.perf_counter = lambda: 10.0
    device.add(Pending(Receipt(0, step + 1, 1, None, None), step + 1), torch.tensor(55.5).double())
    assert Event.num_made == 3
    arrived += device.take_all()
    assert Event.num_waits > 0
    assert [pending.step for pending in arrived] == list(range(1, step + 2))
    assert [pending.receipt.loss for pending in arrived] == [n / 2 for n in range(1, step + 2)]


def test_slices_of_measured_ranks_are_compared_within_an_epoch(tmp_path: Path):
    known = [Receipt(epoch, batch, 1, 0.5, None) for epoch in (1, 2) for batch in (0, 1)]
    for has_auto_shares, expected in ((True, known[1:2]), (False, known[1:])):
        callback = Receipts(tmp_path, has_auto_shares=has_auto_shares)
        assert callback._choose_repeated(known, (1, 1)) == expected


@pytest.mark.parametrize(
    ("device", "precision", "threads", "ranks", "same", "tolerance"),
    [
        ("cpu", "32-true", 1, 2, True, 0.0),
        ("cpu", "32-true", 1, 3, True, 1e-5),
        ("cpu", "32-true", 2, 1, True, 1e-5),
        ("cpu", "32-true", 1, 1, False, 1e-4),
        ("cpu", "64-true", 2, 1, True, 1e-13),
        ("cuda", "32-true", 1, 1, True, 5e-3),
        ("cuda", "16-mixed", 1, 1, True, 5e-3),
        ("cuda", "bf16-mixed", 1, 1, True, 3e-2),
    ],
)
def test_bits_must_be_equal_only_where_a_machine_repeats_them(
    device: str, precision: str, threads: int, ranks: int, same: bool, tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    strategy = SimpleNamespace(root_device=torch.device(device))
    trainer: Any = SimpleNamespace(strategy=strategy, precision=precision, world_size=ranks)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert tolerance_of(trainer, same) == pytest.approx(tolerance)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert tolerance_of(trainer, same) == pytest.approx(0.0 if same else tolerance)
