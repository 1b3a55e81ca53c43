"""``samestep verify`` on plain scripts: what it finds, and what it leaves alone."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from library.tests.kit import Clock
from library.tests.programs import PATIENCE_S, environment, until
from samestep.verify.experiments import IDENTICAL, STOPPED_WITHIN, Cell, Experiments, Settings
from samestep.verify.main import main
from samestep.verify.program import Programs

SCRIPT = """
import os
import sys
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from samestep import Trainer

KIND = sys.argv[1]
COUNTS = [0]


def collate(samples):
    COUNTS[0] += KIND == "hidden"  # state that nobody can see
    x = torch.stack([x for x, _ in samples]) * (1 + COUNTS[0])
    return x, torch.stack([y for _, y in samples])


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(5, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        losses = (self.net(x) - y).square()
        if KIND == "time":
            return losses.mean() * (1 + os.urandom(1)[0])
        if KIND == "rank":
            return losses.mean() * (1 + 1e-6 * self.global_rank)
        return losses.sum() / 8 if KIND == "sum" else losses.mean()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", (self.net(x) - y).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


if __name__ == "__main__":
    x = torch.randn(256, 5, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    accumulates = 2 if KIND == "fine" else 1
    trainer = Trainer(
        run_dir="runs/mine", max_epochs=30, split_batches=True, monitor="val_loss",
        mode="min", accumulate_grad_batches=accumulates,
    )
    train = DataLoader(data, 8, shuffle=True, collate_fn=collate)
    trainer.fit(Net(), train, DataLoader(data, 8))
"""


def verify(
    folder: Path, capsys: pytest.CaptureFixture[str], kind: str, *options: str
) -> tuple[int, dict[str, dict[str, object]]]:
    """The exit code and the table for one kind of the script."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "runs/mine").mkdir(parents=True)
    (folder / "runs/mine/config.yaml").write_text("of another run: true")
    command = [sys.executable, "script.py", kind]
    code = main(["--steps=12", "--json", *options, "--", *command])
    # The run of the user is neither read nor written.
    assert [path.name for path in (folder / "runs/mine").iterdir()] == ["config.yaml"]
    assert sorted(path.name for path in folder.iterdir()) == ["runs", "script.py"]
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.program
def test_a_run_that_is_the_same_is_identical_everywhere(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    code, table = verify(folder, capsys, "fine")
    assert {name: line["result"] for name, line in table.items()} == {
        "undisturbed": "identical",
        "undisturbed again": "identical",
        "SIGTERM": "identical",
        "SIGTERM within a step": "identical",
        "SIGKILL": "identical",
        "2 ranks": "identical",
        "2 ranks, SIGTERM": "identical",
    }
    assert code == 0


@pytest.mark.program
def test_a_run_that_is_not_reproducible_is_found(folder: Path, capsys: pytest.CaptureFixture[str]):
    code, table = verify(folder, capsys, "time", "--only=undisturbed again")
    line = table["undisturbed again"]
    assert (code, line["result"], line["kind"]) == (1, "differs", "loss")
    assert str(line["hint"]).startswith("two undisturbed runs differ")


def test_only_experiments_that_take_place_are_counted(folder: Path, monkeypatch):
    """A run that never accumulates has no place within a step."""
    shown: list[str] = []
    experiments = Experiments(Settings([], folder, str), shown.append)
    monkeypatch.setattr(experiments, "_run_undisturbed", lambda: Cell(IDENTICAL))
    monkeypatch.setattr(experiments, "_choose_place", lambda name: None)
    monkeypatch.setattr(experiments, "_tasks_for", lambda wanted: [])
    experiments.names = lambda: ["undisturbed", STOPPED_WITHIN]  # type: ignore[method-assign]
    experiments.run()
    assert shown == ["undisturbed ...", "[1/1] undisturbed: identical (0 s)"]


def test_after_the_first_run_it_says_how_long_the_others_take(folder: Path, monkeypatch):
    shown: list[str] = []
    clock = Clock()

    def run_undisturbed() -> Cell:
        clock.sleep(20)
        return Cell(IDENTICAL)

    experiments = Experiments(Settings([], folder, str, jobs=2), shown.append)
    monkeypatch.setattr("samestep.verify.experiments.time", clock)
    monkeypatch.setattr(experiments, "_run_undisturbed", run_undisturbed)
    monkeypatch.setattr(experiments, "_choose_place", lambda name: None)
    cells = dict.fromkeys(experiments.names(), Cell(IDENTICAL))
    monkeypatch.setattr(experiments, "_tasks_for", lambda wanted: [lambda: cells])
    experiments.run()
    assert shown[1:] == [
        "[1/6] undisturbed: identical (20 s)", "9 more programs of 20 s, 2 at once: about 2 min",
    ]  # fmt: skip


@pytest.mark.program
def test_a_program_that_hangs_is_ended(folder: Path):
    (folder / "script.py").write_text("import time\ntime.sleep(1000)")
    command = [sys.executable, "-m", "samestep", "verify", "--timeout-s=1", "--", sys.executable]
    done = subprocess.run(
        [*command, "script.py"],
        cwd=folder, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "error: the command fails undisturbed, it has not ended in time" in done.stderr


@pytest.mark.program
def test_hidden_state_of_the_data_is_found(folder: Path, capsys: pytest.CaptureFixture[str]):
    code, table = verify(folder, capsys, "hidden", "--only=SIGTERM")
    line = table["SIGTERM"]
    assert (code, line["result"], line["kind"]) == (1, "differs", "samples")
    # The signal comes in the middle of the second of three epochs of four steps.
    assert str(line["why"]).startswith("from step 8 (epoch 1, batch 3) in the samples: 8 of 16")
    assert "collate_fn" in str(line["hint"])


@pytest.mark.program
def test_a_loss_that_is_no_mean_is_announced_and_found(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    code, table = verify(folder, capsys, "sum", "--only=2 ranks")
    assert (code, table["2 ranks"]["result"]) == (0, "announced")
    assert table["2 ranks"]["why"] == "the loss is no mean over the samples"


@pytest.mark.program
def test_an_error_on_two_ranks_is_found(folder: Path, capsys: pytest.CaptureFixture[str]):
    """Of one part in a million: with 64 bits it is no rounding."""
    code, table = verify(folder, capsys, "rank", "--only=2 ranks")
    line = table["2 ranks"]
    assert (code, line["result"], line["kind"]) == (1, "differs", "parameter")
    assert str(line["why"]).startswith("from step 1 (epoch 0, batch 0) in parameter net.")
    assert "no mean over its samples" in str(line["hint"])


def verify_script(folder: Path, text: str) -> "subprocess.CompletedProcess[str]":
    (folder / "script.py").write_text(text)
    command = [sys.executable, "-m", "samestep", "verify", "--", sys.executable, "script.py"]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )


@pytest.mark.program
def test_a_program_without_a_run_is_one_message(folder: Path):
    done = verify_script(folder, "print('hello')")
    assert done.returncode == 2
    assert "error: the command has trained nothing with samestep.Trainer" in done.stderr


@pytest.mark.program
def test_a_program_that_fails_shows_its_end(folder: Path):
    done = verify_script(folder, "raise KeyError('x')")
    assert done.returncode == 1
    assert "error: the command fails undisturbed, exit code 1: KeyError: 'x'" in done.stderr
    assert 'script.py", line 1' in done.stderr


def is_alive(pid: str) -> bool:
    try:
        status = Path("/proc", pid, "status").read_text()
    except OSError:
        return False
    # A killed process is there until its parent, or the system, has asked how it ended.
    return "State:\tZ" not in status


@pytest.mark.program
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interrupted_verify_leaves_no_program_behind(folder: Path, signum: int, code: int):
    pid_file, scratch = folder / "pid", folder / "scratch"
    scratch.mkdir()
    (folder / "script.py").write_text(
        f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(1000)"
    )
    command = [sys.executable, "-m", "samestep", "verify", "--", sys.executable, "script.py"]
    with subprocess.Popen(
        command, cwd=folder, env=environment(TMPDIR=str(scratch)), stderr=subprocess.PIPE
    ) as verify_process:
        until(lambda: pid_file.exists() and pid_file.read_text())
        verify_process.send_signal(signum)
    assert verify_process.returncode == code
    until(lambda: not is_alive(pid_file.read_text()))
    assert list(scratch.iterdir()) == []


@pytest.mark.program
def test_a_signal_while_a_program_is_started_leaves_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Python has started the program, and verify does not know it yet."""
    ends = threading.Event()
    end_all = Programs.end_all

    class Started(subprocess.Popen[bytes]):
        seconds: float | None = None

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            os.kill(os.getpid(), signal.SIGTERM)
            # In the main thread the handler has raised by now.
            assert ends.wait(PATIENCE_S)

        def wait(self, timeout: float | None = None) -> int:
            self.seconds = self.seconds or timeout
            return super().wait(timeout)

    started: list[Started] = []

    def end_all_and_say(programs: Programs) -> None:
        end_all(programs)
        ends.set()

    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(Programs, "end_all", end_all_and_say)
    with pytest.raises(SystemExit, match="143"):
        main([f"--keep={tmp_path / 'kept'}", "--timeout-s=1", "--", "sleep", "1000"])
    (process,) = started
    try:
        assert process.returncode == -signal.SIGKILL
        assert process.seconds is None, "verify has waited for its end"
    finally:
        process.kill()
        process.wait()
