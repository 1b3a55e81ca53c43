import signal
import subprocess
import sys
from pathlib import Path

import pytest

import samestep
from library.tests.programs import environment, run_code, until

PROGRAM = """
import os, signal, time
from samestep.ranks import stopping
stopping.install()
{}
"""


def outcome(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_code(PROGRAM.format(program), **variables)


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_before_the_first_step_ends_the_process_at_once(signum: int, code: int):
    done = outcome(f"os.kill(os.getpid(), {signum:d}); time.sleep(60)")
    assert done.returncode == code
    assert done.stderr == ""


def test_a_deferred_signal_waits_until_it_is_asked_for():
    done = outcome(
        "stopping.defer(); os.kill(os.getpid(), signal.SIGTERM)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print(stopping.agreed(save=True)[0], flush=True)\n"
        "stopping.allow_interruption(True)\n"
        "try:\n"
        "    with stopping.interruptible(): print('never')\n"
        "except stopping.Stopped as stopped: print(stopped.name, stopped.code)\n"
    )
    assert done.stdout == "15\nSIGTERM 143\n"
    assert done.returncode == 0


def test_a_closed_terminal_is_a_signal_that_waits_too():
    done = outcome(
        "stopping.defer(); os.kill(os.getpid(), signal.SIGHUP)\n"
        "print(stopping.agreed(save=True), flush=True)\n"
        "stopping.check()"
    )
    assert (done.stdout, done.returncode) == ("(1, True)\n", 129)


def test_nohup_keeps_a_run_from_stopping():
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    program = PROGRAM.format("os.kill(os.getpid(), signal.SIGHUP); print(stopping.agreed())")
    done = run_code(ignore + program)
    assert (done.stdout, done.returncode) == ("(0, False)\n", 0)


def test_a_wait_for_data_is_ended_by_a_signal():
    done = outcome(
        "stopping.defer(); os.system(f'(sleep 1; kill -TERM {os.getpid()}) &')\n"
        "stopping.allow_interruption(True)\n"
        "with stopping.interruptible(): time.sleep(60)"
    )
    assert done.returncode == 143


def test_a_second_ctrl_c_does_not_wait():
    done = outcome(
        "stopping.defer(); os.kill(os.getpid(), signal.SIGINT)\n"
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    )
    assert "KeyboardInterrupt" in done.stderr


RANK = """
import os, time
from samestep.ranks import process, stopping
def wait_for_the_end_of_the_agent():
    print(os.getpid(), flush=True)
    while os.getppid() == process.parent(): time.sleep(0.1)
def main():
    {}
    stopping.GRACE_S = 1
    stopping.install()
    stopping.defer()
    print(os.getpid(), flush=True)
    time.sleep(1000)
process.run(main)
"""


@pytest.mark.parametrize("before", ["pass", "wait_for_the_end_of_the_agent()"])
def test_an_orphan_ends_itself(before: str):
    worker = RANK.format(before)
    agent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys\n"
         f"subprocess.run([sys.executable, '-c', {worker!r}])"],
        env=environment(TORCHELASTIC_RUN_ID="x", RANK="0"), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert agent.stdout is not None
    with agent.stdout:
        pid = int(agent.stdout.readline())
        agent.kill()
        agent.wait()
        until(lambda: not Path(f"/proc/{pid}").exists(), says=lambda: "the orphan lives on")


def test_a_validation_is_not_interrupted():
    done = outcome(
        "stopping.defer(); os.kill(os.getpid(), signal.SIGTERM)\n"
        "with stopping.interruptible(): print('to its end')\n"
        "stopping.check()"
    )
    assert done.stdout == "to its end\n"
    assert done.returncode == 143


def test_a_loader_process_ends_when_its_rank_says_so():
    done = outcome(
        "stopping.defer()\n"
        "is_ready, says_ready = os.pipe()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "    os.write(says_ready, b'.')\n"
        "    time.sleep(60)\n"
        "os.read(is_ready, 1)\n"
        "os.system(f'kill -INT {child}; kill -TERM {child}'); time.sleep(0.5)\n"
        "print(os.waitpid(child, os.WNOHANG)[0], flush=True)\n"
        "os.kill(child, signal.SIGTERM)\n"
        "print(os.waitpid(child, 0)[1])"
    )
    assert done.stdout == "0\n0\n", done.stderr


def test_nothing_else_listens_to_signals():
    files = Path(samestep.__file__).parent.rglob("*.py")
    users = {path.name for path in files if "signal.signal(" in path.read_text()}
    searches = {"forks.py", "cluster_job.py"}  # processes that train nothing
    assert users == {"stopping.py", "process.py"} | searches
