"""A forked trial is the process that ``python train.py`` would be, without the imports."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from library.tests.programs import PATIENCE_S, until
from samestep.sweep import forks
from tests.conftest import environment, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has forks of trials")

FACTS = """
import gc, json, multiprocessing, os, signal, sys, threading
import numpy, torch
from threadpoolctl import threadpool_info
signals = [str(signal.getsignal(number)) for number in (2, 13, 15, 17)]
torch.manual_seed(0)
product = torch.rand(300, 300) @ torch.rand(300, 300)
del os.environ["PYTEST_CURRENT_TEST"]
facts = {
    "words": sys.argv, "main": __name__,
    "file": __file__, "path": sys.path[0], "cwd": os.getcwd(),
    "environ": dict(os.environ), "signals": signals, "collects": gc.isenabled(),
    "stdin": sys.stdin.read(), "leads": os.getsid(0) == os.getpid(),
    "descriptors": [os.path.exists(f"/proc/self/fd/{number}") for number in (0, 1, 2)],
    "sum": product.double().sum().item(), "threads": torch.get_num_threads(),
    "pools": sorted(str(pool) for pool in threadpool_info()),
    "others": threading.active_count(), "method": multiprocessing.get_start_method(),
}
json.dump(facts, open(sys.argv[1], "w"), sort_keys=True)
print("the last words")
"""
MAIN = """
import os, signal, sys
from pathlib import Path
if __name__ == "__main__":
    from samestep.sweep import forks
    os.setpgrp()
    forks.serve(can_fork=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.killpg(0, signal.SIGINT)  # Ctrl-C in the terminal does not end the server
    process = forks.start([sys.argv[1] + "/script.py"], {}, Path(sys.argv[1], "log"))
    process.join()
"""
SLEEPS = "import sys, time; open(sys.argv[1], 'w').close(); time.sleep(600)"


@pytest.fixture(scope="module", autouse=True)
def served():
    """The server is one of this process, and ends with it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(OMP_NUM_THREADS="2").items():
            patch.setenv(name, value)
        forks.serve(can_fork=True)
        yield


def start(folder: Path, code: str, *words: str, **variables: str):
    script = folder / "script.py"
    script.write_text(code)
    return forks.start([str(script), *words], variables, folder / "log")


def exit_code_of(process) -> int:
    process.join(PATIENCE_S)
    return process.exitcode


def test_a_fork_has_what_a_fresh_process_has(tmp_path: Path):
    words = [str(tmp_path / "forked.json"), "a=b"]
    assert exit_code_of(start(tmp_path, FACTS, *words, OWN="mine")) == 0
    assert (tmp_path / "log").read_text() == "the last words\n"
    forked = json.loads((tmp_path / "forked.json").read_text())
    subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), *words],
        env=environment(OMP_NUM_THREADS="2", OWN="mine"), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, start_new_session=True, check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    fresh = json.loads((tmp_path / "forked.json").read_text())
    # The server has the variables and the libraries of pytest too.
    assert fresh.pop("environ").items() - forked.pop("environ").items() == set()
    assert {*fresh.pop("pools")} - {*forked.pop("pools")} == set()
    assert {name: (fact, fresh[name]) for name, fact in forked.items() if fact != fresh[name]} == {}


def test_a_fork_shares_its_memory(tmp_path: Path):
    code = f"import torch, sys\n{SLEEPS}"
    forked = start(tmp_path, code, str(tmp_path / "ready"))
    until((tmp_path / "ready").exists)
    lines = Path(f"/proc/{forked.pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    forked.terminate()
    assert exit_code_of(forked) == -signal.SIGTERM
    assert kib["Private_Dirty"] < kib["Rss"] / 4


@pytest.mark.parametrize(
    ("code", "exit_code", "printed"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no"),
        ("import atexit; atexit.register(print, 'bye'); 1 / 0", 1, "bye"),
        ("raise KeyError('key')", 1, "KeyError: 'key'"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import threading; threading.Thread(target=print, args=['last']).start()", 0, "last"),
    ],
)  # fmt: skip
def test_a_fork_ends_as_python_does(tmp_path: Path, code, exit_code, printed):
    assert exit_code_of(start(tmp_path, code)) == exit_code
    assert printed in (tmp_path / "log").read_text()


def test_a_trial_survives_its_server_and_is_not_started_twice(tmp_path: Path):
    words = str(tmp_path / "ready"), str(tmp_path / "again")
    code = f"import os; open(sys.argv[1] + '.server', 'w').write(str(os.getppid()))\n{SLEEPS}"
    first = start(tmp_path, f"import sys\n{code}", words[0])
    until((tmp_path / "ready").exists)
    os.kill(server := int((tmp_path / "ready.server").read_text()), signal.SIGKILL)
    assert exit_code_of(first) == 255
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)  # it has let go of its pipes, and is gone
    assert forks.is_running(tmp_path / "log")
    second = start(tmp_path, f"import sys\n{code}", words[1])
    assert not (tmp_path / "again").exists()
    os.kill(first.pid, signal.SIGTERM)
    until((tmp_path / "again").exists)
    second.terminate()
    assert exit_code_of(second) == -signal.SIGTERM
    assert not forks.is_running(tmp_path / "log")


@pytest.mark.parametrize("threads", [0, 1])
def test_with_a_library_that_starts_a_thread_each_trial_is_python_itself(tmp_path: Path, threads):
    # Python imports this module when it starts, so the server has its threads too.
    (tmp_path / "sitecustomize.py").write_text(
        "from threading import Thread, Event\n"
        f"for _ in range({threads}): Thread(target=Event().wait, daemon=True).start()"
    )
    (tmp_path / "script.py").write_text("import sys; print('lightning' in sys.modules)")
    (tmp_path / "main.py").write_text(MAIN)
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    done = run(str(tmp_path / "main.py"), str(tmp_path), PYTHONPATH=path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "log").read_text() == f"{not threads}\n"
