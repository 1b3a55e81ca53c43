"""A forked trial is the process that ``python train.py`` would be, without the imports."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from library.tests.programs import until
from samestep.sweep.forks import Forked, Forks
from tests.conftest import environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Forks needs Linux")

FACTS = """
import gc, json, os, signal, sys, threading
import numpy, torch
from threadpoolctl import threadpool_info
signals = [str(signal.getsignal(number)) for number in (2, 13, 15, 17)]
torch.manual_seed(0)
product = torch.rand(300, 300) @ torch.rand(300, 300)
facts = {
    "words": sys.argv, "main": __name__, "file": __file__, "path": sys.path, "cwd": os.getcwd(),
    "environ": dict(os.environ), "signals": signals, "collects": gc.isenabled(),
    "stdin": sys.stdin.read(), "leads": os.getsid(0) == os.getpid(),
    "descriptors": sorted(set(os.listdir("/proc/self/fd")))[:3],
    "sum": product.double().sum().item(), "threads": torch.get_num_threads(),
    "pools": sorted(str(pool) for pool in threadpool_info()),
    "others": threading.active_count(),
}
json.dump(facts, open(sys.argv[1], "w"), sort_keys=True)
print("the last words")
"""
SLEEPS = "import sys, time; open(sys.argv[1], 'w').close(); time.sleep(60)"


@contextmanager
def serving(modules: Sequence[str]) -> Iterator[Forks]:
    forks = Forks(modules)
    yield forks
    forks.connection.close()
    forks.server.wait(30)  # it ends with its client


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(OMP_NUM_THREADS="2").items():
            patch.setenv(name, value)
        with serving(["json", "numpy", "torch", "threadpoolctl", "no_such_module"]) as server:
            yield server


def start(forks: Forks, folder: Path, code: str, *words: str, **variables: str) -> Forked:
    script = folder / "script.py"
    script.write_text(code)
    with (folder / "log").open("ab") as output:
        forked = forks.start(
            [str(script), *words], environment(OMP_NUM_THREADS="2", **variables), output
        )
    assert forked
    return forked


def test_a_fork_has_what_a_fresh_process_has(forks: Forks, tmp_path: Path):
    words = [str(tmp_path / "forked.json"), "a=b"]
    assert start(forks, tmp_path, FACTS, *words, OWN="mine").wait() == 0
    assert (tmp_path / "log").read_text() == "the last words\n"
    forked = (tmp_path / "forked.json").read_text()
    subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), *words],
        env=environment(OMP_NUM_THREADS="2", OWN="mine"), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, start_new_session=True, check=True, timeout=120,
    )  # fmt: skip
    assert forked == (tmp_path / "forked.json").read_text()


def test_a_fork_shares_its_memory(forks: Forks, tmp_path: Path):
    code = f"import torch, sys\n{SLEEPS}"
    forked = start(forks, tmp_path, code, str(tmp_path / "ready"))
    until((tmp_path / "ready").exists)
    lines = Path(f"/proc/{forked.pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    forked.terminate()
    assert forked.wait() == -signal.SIGTERM
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
def test_a_fork_ends_as_python_does(forks: Forks, tmp_path: Path, code, exit_code, printed):
    assert start(forks, tmp_path, code).wait() == exit_code
    assert printed in (tmp_path / "log").read_text()


def test_killing_a_fork_or_the_server_ends_nothing_else(tmp_path: Path):
    both = []
    with serving(["json"]) as forks, (tmp_path / "log").open("ab") as output:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            both.append(start(forks, tmp_path / name, SLEEPS, str(tmp_path / name / "ready")))
            until((tmp_path / name / "ready").exists)
        os.kill(both[0].pid, signal.SIGKILL)
        assert both[0].wait() == -signal.SIGKILL
        forks.server.kill()
        forks.server.wait()
        assert forks.start([str(tmp_path / "one/script.py")], {}, output) is None
    assert both[1].poll() is None
    both[1].terminate()
    assert both[1].wait() == -signal.SIGTERM


def test_a_library_that_starts_a_thread_is_not_forked(tmp_path: Path, monkeypatch):
    (tmp_path / "threaded.py").write_text(
        "from threading import Thread, Event\nThread(target=Event().wait, daemon=True).start()"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{environment()['PYTHONPATH']}")
    with serving(["threaded"]) as forks, (tmp_path / "log").open("ab") as output:
        assert forks.start([str(tmp_path / "threaded.py")], {}, output) is None
