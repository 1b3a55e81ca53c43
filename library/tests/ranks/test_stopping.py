import subprocess
import sys
from pathlib import Path

import pytest

import samestep
from library.tests.programs import environment, run_code, until

IN_TURN = """
import faulthandler, os, signal, sys, time
from library.tests.programs import is_pending, until
from samestep.ranks import stopping
stopping.interrupts.say_interrupted = lambda: print("said", flush=True)
for text in sys.argv[1:]:
    if child := os.fork():
        print("ends", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    stopping.install()
    try:
        exec(text)
    except (stopping.Interrupted, stopping.Stopped) as stopped:
        os._exit(stopped.code)
    os._exit(0)
"""
ENDS = {  # what a process does, and what is printed
    # Before the first step a signal ends it at once.
    "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)": "ends 143\n",
    "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)": "said\nends 130\n",
    # A deferred signal waits until it is asked for; a closed terminal is one too.
    """stopping.defer()
for _ in range(2): os.kill(os.getpid(), signal.SIGTERM)
print(stopping.agreed(save=True)[0], flush=True)
stopping.interruptible(lambda: print('at once', flush=True))
stopping.READ_S = 0.01
stopping.interruptible(lambda: time.sleep(60))
""": "15\nat once\nends 143\n",
    """stopping.defer(); os.kill(os.getpid(), signal.SIGHUP)
print([*map(int, stopping.agreed(save=True))], flush=True)
stopping.check()
""": "[1, 1, 0, 0, 0]\nends 129\n",
    # A wait for the next batch is ended.
    """stopping.defer()
stopping.interruptible(lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(60)))
""": "ends 143\n",
    # Nothing else is, such as a validation.
    """stopping.defer(); os.kill(os.getpid(), signal.SIGTERM)
print('to its end', flush=True)
stopping.check()
""": "to its end\nends 143\n",
    # What asks to save ends nothing, and is asked for once; under Slurm SIGUSR1 asks for more.
    """os.kill(os.getpid(), signal.SIGUSR1); stopping.defer()
print([*map(int, stopping.agreed())], [*map(int, stopping.agreed())], flush=True)
os.environ["SLURM_JOB_ID"] = "7"
for number in (signal.SIGUSR2, signal.SIGUSR1):
    os.kill(os.getpid(), number)
    stopping.check()
    print([*map(int, stopping.agreed())], flush=True)
""": "[0, 0, 0, 1, 0] [0, 0, 0, 0, 0]\n[0, 0, 0, 1, 0]\n[0, 0, 0, 1, 1]\nends 0\n",
    # Handlers of the program stay, also that of a library in C.
    """stopping.uninstall()
signal.signal(signal.SIGUSR1, lambda *_: print('mine', flush=True))
faulthandler.register(signal.SIGUSR2, file=open(os.devnull, 'w'))
stopping.install(); stopping.defer()
for number in (signal.SIGUSR1, signal.SIGUSR2): os.kill(os.getpid(), number)
print(stopping.agreed().asked, flush=True)
""": "mine\nFalse\nends 0\n",
    # After training there is nothing to say.
    """stopping.defer(); stopping.defer(False)
os.kill(os.getpid(), signal.SIGINT)
""": "ends 130\n",
    # A second Ctrl-C does not wait.
    """stopping.defer(); stopping._say_stopping = str
for _ in range(2): os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
""": "ends 130\n",
    # A loader process ends when its rank says so, and not before.
    """stopping.defer()
is_ready, says_ready = os.pipe()
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.write(says_ready, b'.')
    time.sleep(60)
os.read(is_ready, 1)
for _ in range(2):  # when the second one is taken, the first was ignored
    os.system(f'kill -INT {child}; kill -TERM {child}')
    until(lambda: not is_pending(child, signal.SIGTERM))
print(os.waitpid(child, os.WNOHANG)[0], flush=True)
os.kill(child, signal.SIGTERM)
print(os.waitpid(child, 0)[1], flush=True)
""": "0\n0\nends 0\n",
}


@pytest.mark.program
def test_when_a_signal_ends_a_process():
    # As without nohup, under which the tests may run.
    obey = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    done = run_code(obey + IN_TURN, *ENDS)
    assert (done.stdout, done.stderr) == ("".join(ENDS.values()), "")


@pytest.mark.program
def test_nohup_keeps_a_run_from_stopping():
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    hang_up = "os.kill(os.getpid(), signal.SIGHUP); print(stopping.agreed()[:3], flush=True)"
    done = run_code(ignore + IN_TURN, hang_up)
    assert done.stdout == "(0, False, False)\nends 0\n"


RANK = """
import os, time
if os.fork():
    time.sleep(1000)  # the agent
from samestep.ranks import environment, process, stopping
def wait_for_the_end_of_the_agent():
    print(os.getpid(), flush=True)
    while os.getppid() == environment.parent(): time.sleep(0.1)
def main():
    {}
    stopping.GRACE_S = 1
    stopping.install()
    stopping.defer()
    print(os.getpid(), flush=True)
    time.sleep(1000)
process.run(main)
"""


@pytest.mark.program
@pytest.mark.parametrize("before", ["pass", "wait_for_the_end_of_the_agent()"])
def test_an_orphan_ends_itself(tmp_path: Path, before: str):
    script = tmp_path / "script.py"
    script.write_text(RANK.format(before))
    agent = subprocess.Popen(
        [sys.executable, str(script)], env=environment(TORCHELASTIC_RUN_ID="x", RANK="0"),
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert agent.stdout is not None
    with agent.stdout:
        pid = int(agent.stdout.readline())
        agent.kill()
        agent.wait()
        until(lambda: not Path(f"/proc/{pid}").exists(), says=lambda: "the orphan lives on")


def test_nothing_else_listens_to_signals():
    files = Path(samestep.__file__).parent.rglob("*.py")
    users = {path.name for path in files if "signal.signal(" in path.read_text()}
    # A search, a grid, the user's own scripts, `samestep verify`, a fork that forgets its handlers,
    # and an agent.
    train_nothing = {
        "cluster_job.py", "driver.py", "script.py", "main.py", "loss_check.py", "requests.py",
    }  # fmt: skip
    # The last one removes a handler of torch when Python ends.
    of_ranks = {"stopping.py", "process.py", "interrupts.py", "child_signals.py"}
    assert users == of_ranks | train_nothing
