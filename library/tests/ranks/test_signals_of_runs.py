"""Real signals to runs, a terminal that is closed, and a reader that goes away."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.launcher.api import LaunchConfig

from library.tests.programs import PATIENCE_S, environment, until
from samestep.ranks.interrupts import INTERRUPTED
from samestep.ranks.stopping import STOPPING

pytestmark = pytest.mark.program

SCRIPT = """
import json, sys, time
from library.tests.kit import Net, batches
from samestep import Trainer

class Slow(Net):
    def training_step(self, batch, batch_idx):
        print("step", self.global_step, flush=True)
        time.sleep(0.1)
        return super().training_step(batch, batch_idx)

options = {"run_dir": "mine", "max_epochs": 100, "accelerator": "cpu"} | json.loads(sys.argv[1])
Trainer(**options).fit(Slow(), batches(64))
"""
TESTS = """
import time
from library.tests.kit import Net, batches
from samestep import Trainer

class Slow(Net):
    def test_step(self, batch, batch_idx):
        print("test", batch_idx, flush=True)
        time.sleep(0.1)

options = {"enable_progress_bar": False, "enable_model_summary": False}
trainer = Trainer(run_dir="mine", max_epochs=1, accelerator="cpu", devices=2, **options)
trainer.fit(Slow(), batches(8))
trainer.test(dataloaders=batches(8_000))
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
SAMESTEP_RUN = ("-m", "samestep", "run", "--nproc-per-node=2")
pytestmark = pytest.mark.program
QUIET = {"enable_progress_bar": False, "enable_model_summary": False}


def state_of(folder: Path) -> tuple[str, str]:
    record = json.loads((folder / "mine/run.json").read_text())
    return record["state"], record["why"]


class Run:
    """A run of the script in a process of its own, whose output is in a file."""

    def __init__(
        self, folder: Path, *launcher: str, script: str = SCRIPT, **variables: str
    ) -> None:
        options = QUIET | ({} if launcher[:1] == ("-m",) else {"devices": int(launcher[0])})
        self.output = folder / "output"
        (folder / "script.py").write_text(script)
        words, arguments = (launcher, ()) if launcher[:1] == ("-m",) else ((), launcher[1:])
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, *words, "script.py", json.dumps(options), *arguments],
                cwd=folder, env=environment(**variables), stdout=file, stderr=file,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def wait_for(self, text: str, count: int = 1) -> None:
        def is_printed() -> bool:
            is_there = self.output.read_text().count(text) >= count
            return is_there or self.process.poll() is not None

        until(is_printed, says=self.output.read_text)
        assert self.process.poll() is None, self.output.read_text()

    def ends_with(self, exit_code: int) -> str:
        assert self.process.wait(PATIENCE_S) == exit_code, self.output.read_text()
        printed = self.output.read_text()
        assert "Traceback" not in printed
        return printed


@pytest.mark.parametrize("launcher", [("2",), SAMESTEP_RUN])
def test_an_agent_passes_on_what_asks_to_save(tmp_path: Path, launcher: tuple[str, ...]):
    run = Run(tmp_path, *launcher)
    for number, name in enumerate((signal.SIGUSR1, signal.SIGUSR2), start=1):
        run.wait_for("step 3")
        run.process.send_signal(name)
        run.wait_for("Saved after step ", count=number)
    run.process.send_signal(signal.SIGTERM)
    assert "Stopped by SIGTERM after step " in run.ends_with(143)


def test_ranks_save_when_sigusr1_has_ended_torchrun(tmp_path: Path):
    run = Run(tmp_path, *TORCHRUN)
    run.wait_for("step 3")
    run.process.send_signal(signal.SIGUSR1)
    assert run.process.wait(PATIENCE_S) == -signal.SIGUSR1
    until(lambda: state_of(tmp_path) == ("stopped", "SIGTERM"), says=run.output.read_text)
    assert (tmp_path / "mine/checkpoints/last.ckpt").exists()


LONG_VALIDATION = """
import json, os, sys, time
from library.tests.kit import Net, batches
from samestep import Trainer
from samestep.callbacks.checkpoints import Checkpoints
from samestep.ranks import stopping

if "RANK" in os.environ and sys.argv[2:] == ["importing"]:
    print("importing", flush=True)
    time.sleep(1000)

is_slow_at_saving = sys.argv[2:] == ["saving"]
if is_slow_at_saving:
    commit = Checkpoints._commit
    def commit_slowly(checkpoints, trainer):
        if stopping._State.signum:
            print("committing", flush=True)
            time.sleep(1000)
        commit(checkpoints, trainer)
    Checkpoints._commit = commit_slowly

class Slow(Net):
    def validation_step(self, batch, batch_idx):
        if self.trainer.global_step == 24:
            print("validating", flush=True)
            # The signal must come before the next save, and not after the run.
            while not (is_slow_at_saving and stopping._State.signum):
                time.sleep(0.01)

options = {"run_dir": "mine", "max_epochs": 9, "accelerator": "cpu"} | json.loads(sys.argv[1])
options |= {"num_sanity_val_steps": 0, "save_every_s": 1e9, "val_check_interval": 8}
Trainer(**options).fit(Slow(), batches(64), batches(1))
"""


@pytest.mark.parametrize("launcher", [("1",), ("2",), SAMESTEP_RUN])
def test_ctrl_c_is_answered_at_once_and_the_second_one_ends_the_run(
    tmp_path: Path, launcher: tuple[str, ...]
):
    run = Run(tmp_path, *launcher, script=LONG_VALIDATION)
    run.wait_for("validating")
    run.process.send_signal(signal.SIGINT)
    run.wait_for(STOPPING)
    run.process.send_signal(signal.SIGINT)
    printed = run.ends_with(130)
    assert printed.count(STOPPING) == 1
    lost = "Ended without saving. Lost steps: 8, since the checkpoint of step 16.\n"
    assert printed.count(lost) == 1
    assert state_of(tmp_path) == ("stopped", "a second Ctrl-C")


def test_a_second_ctrl_c_while_the_run_saves_says_what_is_lost(tmp_path: Path):
    run = Run(tmp_path, "1", "saving", script=LONG_VALIDATION)
    run.wait_for("validating")
    run.process.send_signal(signal.SIGINT)
    run.wait_for("committing")
    run.process.send_signal(signal.SIGINT)
    assert run.ends_with(130).count(". Lost steps: ") == 1
    assert state_of(tmp_path) == ("stopped", "a second Ctrl-C")


def test_ctrl_c_ends_ranks_that_still_import_without_a_traceback(tmp_path: Path):
    run = Run(tmp_path, "2", "importing", script=LONG_VALIDATION)
    run.wait_for("importing", count=2)
    run.process.send_signal(signal.SIGINT)
    assert run.ends_with(130).count(INTERRUPTED) == 1
    assert not (tmp_path / "mine").exists()


def make_scontrol(folder: Path, exit_code: int) -> dict[str, str]:
    """Variables of a job of Slurm, with a ``scontrol`` that notes how it was called."""
    program = folder / "bin/scontrol"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho $@ >> {folder}/called; echo no >&2; exit {exit_code}\n")
    program.chmod(0o755)
    return {"SLURM_JOB_ID": "7", "PATH": f"{program.parent}:{os.environ['PATH']}"}


def test_sigusr1_in_a_job_of_slurm_saves_queues_it_again_and_stops(tmp_path: Path):
    run = Run(tmp_path, "2", **make_scontrol(tmp_path, 0))
    run.wait_for("step 3")
    run.process.send_signal(signal.SIGUSR1)
    assert "Stopped by SIGUSR1 after step " in run.ends_with(138)
    assert (tmp_path / "called").read_text() == "requeue 7\n"
    assert state_of(tmp_path) == ("stopped", "SIGUSR1")


def test_sigusr1_in_a_job_of_slurm_queues_a_test_again(tmp_path: Path):
    run = Run(tmp_path, "2", script=TESTS, **make_scontrol(tmp_path, 0))
    run.wait_for("test 3")
    run.process.send_signal(signal.SIGUSR1)
    run.ends_with(138)
    assert (tmp_path / "called").read_text() == "requeue 7\n"


def test_a_job_that_slurm_does_not_queue_again_trains_on(tmp_path: Path):
    run = Run(tmp_path, "1", **make_scontrol(tmp_path, 1))
    run.wait_for("step 3")
    run.process.send_signal(signal.SIGUSR1)
    run.wait_for("Note: `scontrol requeue 7` has failed (no), so the run continues until its limit")
    run.wait_for("Saved after step ")
    run.process.send_signal(signal.SIGTERM)
    run.ends_with(143)


# The first thing that a process without a terminal opens becomes its own.
ON_TERMINAL = """
import os, signal
os.close(os.open(os.ttyname(0), os.O_RDWR))
signal.signal(signal.SIGHUP, signal.{})
"""


def close_terminal(folder: Path, disposition: str, options: dict[str, Any]) -> int:
    """Close the terminal of a run; returns its exit code."""
    (folder / "script.py").write_text(ON_TERMINAL.format(disposition) + SCRIPT)
    terminal, end_of_run = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "script.py", json.dumps(options)], cwd=folder,
        env=environment(), stdin=end_of_run, stdout=end_of_run, stderr=end_of_run,
        start_new_session=True,
    )  # fmt: skip
    os.close(end_of_run)
    seen = b""
    while b"step 3" not in seen:
        seen += os.read(terminal, 4096)
    os.close(terminal)
    return process.wait(PATIENCE_S)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_whose_terminal_is_closed_saves(tmp_path: Path, devices: int):
    """With the progress bar of Lightning, which cannot be drawn any more."""
    assert close_terminal(tmp_path, "SIG_DFL", {"devices": devices}) == 129
    assert state_of(tmp_path) == ("stopped", "SIGHUP")
    assert (tmp_path / "mine/checkpoints/last.ckpt").exists()


@pytest.mark.skipif(
    not hasattr(LaunchConfig, "signals_to_handle"),
    reason="the agent of torch 2.8 handles SIGHUP always",
)
def test_a_run_under_nohup_goes_on_without_its_terminal(tmp_path: Path):
    options = {"devices": 2, "max_epochs": 2}
    assert close_terminal(tmp_path, "SIG_IGN", options) == 0
    assert state_of(tmp_path) == ("finished", "")


def test_a_reader_that_goes_away_loses_the_output_and_not_the_run(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    options = json.dumps({"devices": 1, "max_epochs": 1})
    with (tmp_path / "errors").open("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "script.py", options], cwd=tmp_path, env=environment(),
            stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
        # As `head -n 1` does.
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        exit_code = process.wait(PATIENCE_S)
        errors.seek(0)
        said = errors.read()
    assert exit_code == 0, said
    assert "BrokenPipe" not in said
    assert state_of(tmp_path)[0] == "finished"
