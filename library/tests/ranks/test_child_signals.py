"""Real signals to a whole process group: the loader processes must not end before their rank."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from library.tests.programs import PATIENCE_S, environment, run, until
from samestep.ranks import child_signals

pytestmark = pytest.mark.program

SCRIPT = """
import sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset

class Data(TensorDataset):
    def __getstate__(self):
        # A new Python is started with the data, and will import for seconds.
        print("starts a process", flush=True)
        return self.__dict__

def main():
    # Not above: each process of the loader would import them too.
    from library.tests.kit import Net
    from samestep import Trainer

    class Slow(Net):
        def training_step(self, batch, batch_idx):
            print("step", self.global_step, flush=True)
            time.sleep(0.05)
            return super().training_step(batch, batch_idx)

    options = {"max_epochs": 100, "accelerator": "cpu", "enable_progress_bar": False, "devices": 1}
    trainer = Trainer(run_dir="mine", enable_model_summary=False, **options)
    data = Data(torch.arange(2.0 * int(sys.argv[2]))[:, None])
    num = {"num_workers": 2 if sys.argv[1] == "fork" else 1}
    trainer.fit(Slow(), DataLoader(data, 2, multiprocessing_context=sys.argv[1], **num))

if __name__ == "__main__":
    main()
"""


LEFT = """
import multiprocessing, signal, time
del signal.sigwaitinfo
from samestep.ranks import stopping
from torch.utils.data._utils import signal_handling

stopping.install()
context = multiprocessing.get_context("fork")
ended, left = [context.Process(target=time.sleep, args=(10_000,), daemon=True) for _ in range(2)]
for process in (ended, left):
    process.start()
ended.terminate()
ended.join()
print(ended.exitcode)
# As an iterator of a DataLoader does, which need not have ended either.
signal_handling._set_SIGCHLD_handler()
signal_handling._set_worker_pids(0, (left.pid,))
"""


def send_in_turn(
    folder: Path, method: str, *turns: tuple[str, str], num_steps: int = 200
) -> tuple[int, str]:
    """Train; send each signal to the whole process group when its text has been printed after the
    one before. Returns the exit code, and what was printed."""
    (folder / "script.py").write_text(SCRIPT)
    output = folder / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "script.py", method, str(num_steps)], cwd=folder, env=environment(),
            stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    try:
        seen = 0
        for text, name in turns:

            def is_printed(text: str = text, seen: int = seen) -> bool:
                return text in output.read_text()[seen:] or process.poll() is not None

            until(is_printed, says=output.read_text)
            seen = len(output.read_text())
            os.killpg(process.pid, signal.Signals[name])
        return process.wait(PATIENCE_S), output.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_signal_to_the_process_group_saves(tmp_path: Path, method: str):
    turns = (
        ("step 3", "SIGUSR1"),
        ("Saved after step ", "SIGUSR2"),
        ("Saved after step ", "SIGTERM"),
    )
    exit_code, printed = send_in_turn(tmp_path, method, *turns)
    assert exit_code == 143, printed
    assert "Stopped by SIGTERM after step " in printed
    assert "; saved." in printed
    assert "Traceback" not in printed
    assert (tmp_path / "mine/checkpoints/last.ckpt").exists()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_signal_while_the_processes_start_saves(tmp_path: Path, method: str):
    """In the second epoch, which starts processes of its own; they import for seconds."""
    turns = ("step 9", "SIGUSR1"), ("starts a process", "SIGTERM")
    exit_code, printed = send_in_turn(tmp_path, method, *turns, num_steps=10)
    assert exit_code == 143, printed
    assert "Stopped by SIGTERM after step 10; saved." in printed
    # A process that is not ready when its rank ends may find none of its semaphores.
    assert "exited unexpectedly" not in printed


@pytest.mark.program
def test_a_rank_ends_its_processes_where_they_cannot_tell_who_sends_a_signal(tmp_path: Path):
    """As on macOS. One is left at the end: Python waits for it, and torch raises nothing."""
    (tmp_path / "script.py").write_text(LEFT)
    # With an option, so that the fork server does not run it, whose programs skip Python's own end.
    done = run("-B", "script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"-{signal.SIGKILL}\n"), done.stderr
    assert "Traceback" not in done.stderr


def test_a_loader_process_says_nothing_of_a_rank_that_has_stopped(capsys):
    """In the middle of an exchange of memory; on a busy machine a signal meets one now and then."""

    def report(error: BaseException) -> str:
        child_signals.leave_out_lost_rank(type(error), error, None)
        return capsys.readouterr().err

    said: list[str] = []
    for error in (EOFError("gone"), ConnectionResetError("gone"), ValueError("wrong")):
        thread = threading.Thread(target=lambda error=error: said.append(report(error)))
        thread.start()
        thread.join()
    assert said[:2] == ["", ""]
    assert "ValueError: wrong" in said[2]
    assert "EOFError: gone" in report(EOFError("gone"))
