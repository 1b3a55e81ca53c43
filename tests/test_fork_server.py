"""A forked program cannot be told from one in a fresh interpreter."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
from execnet import gateway_io
from hydra.core.global_hydra import GlobalHydra

from library.tests import pods
from library.tests.programs import until
from tests import fork_server
from tests.conftest import environment, run

pytestmark = pytest.mark.skipif(
    fork_server.Popen.server is None, reason="Linux only, and not with SAMESTEP_TESTS_FRESH=1"
)


def outcomes(
    script: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, **variables: str
) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of a script: forked first, then in a fresh interpreter."""
    forked = run(str(script), *arguments, cwd=script.parent, **variables)
    with monkeypatch.context() as patch:
        patch.setattr(fork_server.Popen, "server", None)
        fresh = run(str(script), *arguments, cwd=script.parent, **variables)
    return [(done.returncode, done.stdout, done.stderr) for done in (forked, fresh)]


ENDINGS = {
    "at its last line": ("print('done')", 0),
    "by exit code": ("sys.exit(3)", 3),
    "by a negative exit code": ("sys.exit(-1)", 255),
    "by a message": ("sys.exit('why')", 1),
    "at once": ("os._exit(9)", 9),
    "by an exception": ("def fail():\n    1 / 0\n\nfail()", 1),
    "by a chain of exceptions": ("try:\n    1 / 0\nexcept ArithmeticError:\n    int('x')", 1),
    "by Ctrl-C": ("os.kill(os.getpid(), 2); time.sleep(60)", -signal.SIGINT),
    "by SIGTERM": ("os.kill(os.getpid(), 15); time.sleep(60)", -signal.SIGTERM),
    "after its threads": ("threading.Timer(0.2, print, ['late']).start(); print('early')", 0),
    "after atexit": ("atexit.register(print, 'bye'); print('hello'); sys.exit(4)", 4),
    "after its finalizers": ("weakref.finalize(threading.Lock(), print, 'a'); print('b')", 0),
    "with a finalizer at its end": ("weakref.finalize(os, print, 'late'); print('early')", 0),
    "with a closed stdout": ("print('x', flush=True); sys.stdout.close(); os.close(1)", 0),
    "in a syntax error": ("def", 1),
    "with a warning": ("warnings.warn('careful')", 0),
}
IMPORTS = "import atexit, os, sys, threading, time, warnings, weakref\n"


@pytest.mark.parametrize(("code", "expected"), ENDINGS.values(), ids=ENDINGS)
def test_a_program_ends_as_in_a_fresh_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, expected: int
):
    script = tmp_path / "script.py"
    script.write_text(IMPORTS + code)
    forked, fresh = outcomes(script, monkeypatch)
    assert forked == fresh
    assert forked[0] == expected


SURROUNDINGS = """
import faulthandler, importlib, json, locale, logging, os, signal, sys, threading, warnings
for name in LIBRARIES:
    importlib.import_module(name)
import torch
from hydra.core.singleton import Singleton
from omegaconf.basecontainer import BaseContainer
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import get_method_name
def record():
    return get_method_name()
def caller():
    return record(), get_method_name(1)
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__, "cwd": os.getcwd(),
    "main": sys.modules["__main__"].__file__, "stdin": sys.stdin.read(),
    "environment": dict(os.environ), "parent": os.getppid(), "group": os.getpgid(0),
    "session": os.getsid(0), "umask": os.umask(0), "descriptors": os.listdir("/proc/self/fd"),
    "signals": {n: str(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()},
    "flags": str(sys.flags), "filters": str(warnings.filters), "locale": locale.getlocale(),
    "streams": [str(s) + str(s.line_buffering) + str(s.write_through)
                for s in (sys.stdin, sys.stdout, sys.stderr)],
    "threads": [t.name for t in threading.enumerate()], "logging": str(logging.root.handlers),
    "faulthandler": faulthandler.is_enabled(), "torch": torch.get_num_threads(),
    "builtins": str(__builtins__), "doc": __doc__, "resolvers": sorted(BaseContainer._resolvers),
    "hydra": [str(kind) for kind in Singleton._instances], "callers": caller(),
}))
"""


def test_a_program_finds_what_it_finds_in_a_fresh_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    script = tmp_path / "script.py"
    script.write_text(f"LIBRARIES = {fork_server.LIBRARIES}\n{SURROUNDINGS}")
    forked, fresh = outcomes(script, monkeypatch, "a word", "--flag=1", GIVEN="value")
    assert (forked[0], forked[2]) == (0, "")
    found, expected = json.loads(forked[1]), json.loads(fresh[1])
    assert found == expected
    assert found["environment"]["GIVEN"] == "value"
    assert found["parent"] == os.getpid()
    assert found["callers"] == ["caller", "caller"]


READS_FILES = """
import sys
from pathlib import Path
import yaml
from omegaconf._utils import get_yaml_loader
def read(path):
    with path.open() as file:
        return yaml.load(file, Loader=get_yaml_loader())
path, copied = Path(sys.argv[1]), Path("copy.yaml")
for _ in range(2):  # the second values know nothing of what was done to the first
    values = read(path)
    print(values)
    values["defaults"].clear()
copied.write_text(path.read_text() + "added: 2")
print(read(copied))
copied.write_text(path.read_text() + "added: [")
try:
    read(copied)
except yaml.YAMLError as error:
    print(error)
"""


def test_a_file_that_the_server_has_read_is_what_it_is_in_a_fresh_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    script = tmp_path / "script.py"
    script.write_text(READS_FILES)
    forked, fresh = outcomes(script, monkeypatch, str(fork_server.CONFIGS / "train.yaml"))
    assert forked == fresh
    assert forked[1].count("'added': 2") == 1
    assert "copy.yaml" in forked[1]


COMPOSES = """
from omegaconf import OmegaConf
from samestep.hydra import compose
cfg = compose.check(["model=mlp", "seed=5", "run_id=mine"])
print(OmegaConf.to_yaml(cfg), OmegaConf.to_yaml(cfg, resolve=True))
print([(node._metadata.object_type, node._metadata.flags) for node in (cfg, cfg.model)])
print(OmegaConf.get_cache(cfg).get("oc.env"), type(cfg.trainer._get_node("max_epochs")))
"""


def test_what_hydra_remembers_is_what_a_fresh_interpreter_composes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    script = tmp_path / "script.py"
    script.write_text(COMPOSES)
    project = str(fork_server.CONFIGS.parent)
    first = outcomes(script, monkeypatch, SAMESTEP_PROJECT=project)
    again = outcomes(script, monkeypatch, SAMESTEP_PROJECT=project)
    assert first[0][0] == 0, first[0][2]
    assert first[0] == first[1]
    assert again == first


def test_hydra_remembers_only_what_it_has_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    configs = tmp_path / "configs"
    shutil.copytree(fork_server.CONFIGS, configs)
    monkeypatch.setattr(fork_server, "COMPOSED", str(tmp_path))
    monkeypatch.setattr(fork_server, "CONFIGS", configs)

    def file(*overrides: str, folder: Path = configs) -> Path | None:
        GlobalHydra.instance().clear()
        with hydra.initialize_config_dir(str(folder), version_base="1.3"):
            return fork_server.composed_file("train", list(overrides), False)

    before = file("seed=1")
    assert before is not None
    assert before == file("seed=1")
    assert before != file("seed=2")
    (configs / "train.yaml").write_text((configs / "train.yaml").read_text() + "added: 1\n")
    changed = file("seed=1")
    assert changed != before
    (configs / "model/added.yaml").touch()
    assert file("seed=1") not in (before, changed)
    assert file("hydra.searchpath=[file:///tmp]") is None
    assert file(folder=Path(__file__).parents[1] / "configs") is None


def test_pythonpath_is_read_as_by_a_fresh_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.path)")
    forked, fresh = outcomes(script, monkeypatch, PYTHONPATH="/nowhere:relative")
    assert forked == fresh
    assert "/nowhere" in forked[1]


def test_each_program_draws_its_own_random_numbers(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import random, numpy, torch\n"
        "print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    )
    first, second = (run(str(script)).stdout.split() for _ in range(2))
    assert set(first).isdisjoint(second)


@pytest.mark.parametrize(
    ("options", "variables", "is_forked"),
    [
        ([], {}, True),
        (["-u"], {}, True),
        ([], {"RUN_ID": "mine", "PATH": "/nowhere"}, True),
        (["-X", "dev"], {}, False),
        ([], {"PYTHONPATH": "/nowhere"}, True),
        ([], {"PYTHONHASHSEED": "1"}, False),
        ([], {"OMP_NUM_THREADS": "2"}, False),
        ([], {"MPLBACKEND": "svg"}, False),
    ],
)
def test_where_it_would_be_seen_the_interpreter_is_fresh(
    tmp_path: Path, options: list[str], variables: dict[str, str], is_forked: bool
):
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('torch' in sys.modules)")
    assert run(*options, str(script), **variables).stdout == f"{is_forked}\n"


def test_the_code_of_this_repository_is_not_imported_before(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint({m.split('.')[0] for m in sys.modules})")
    packages = run(str(script)).stdout
    assert "'torch'" in packages
    for name in ("project", "samestep", "tests", "wandb", "mlflow"):
        assert f"'{name}'" not in packages


AGENT = """
import subprocess, sys, time
rank = subprocess.Popen(
    [sys.executable, "-u", sys.argv[1]], stdout=subprocess.PIPE, text=True, start_new_session=True
)
print(rank.stdout.readline(), end="", flush=True)
time.sleep(1000)
"""
RANK = """
import os, sys, time
print(os.getpid(), os.getppid(), os.getsid(0), 'torch' in sys.modules)
time.sleep(1000)
"""


def test_ranks_are_children_of_their_agent(tmp_path: Path):
    agent, rank = tmp_path / "agent.py", tmp_path / "rank.py"
    agent.write_text(AGENT)
    rank.write_text(RANK)
    command = [sys.executable, str(agent), str(rank), "trainer.devices=2"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    with process:
        pid, parent, session, is_forked = process.stdout.readline().split()
        process.kill()
    try:
        assert (int(parent), int(session), is_forked) == (process.pid, int(pid), "True")
        assert process.returncode == -signal.SIGKILL
        # The rank goes on without its agent, and has another parent then.
        until(lambda: f"PPid:\t{parent}\n" not in Path(f"/proc/{pid}/status").read_text())
    finally:
        os.kill(int(pid), signal.SIGKILL)


def test_ranks_of_torchrun_are_forked(tmp_path: Path):
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import os, sys\nprint(os.environ['RANK'], 'torch' in sys.modules, sys.argv, sys.path[0])\n"
        "sys.exit(int(sys.argv[1]))"
    )
    options = ["--standalone", "--nproc-per-node=2", str(rank)]
    done = run("-m", "torch.distributed.run", *options, "0")
    said = f"True ['{rank}', '0'] {tmp_path}"
    assert sorted(done.stdout.splitlines()) == [f"0 {said}", f"1 {said}"]
    assert (done.returncode, done.stderr) == (0, "")
    failed = run("-m", "torch.distributed.run", *options, "3")
    assert failed.returncode == 1
    assert "exitcode  : 3" in failed.stderr


IN_A_TEST_WORKER = """
import os, subprocess, sys
from tests import conftest
conftest.pytest_configure()
command = [sys.executable, SCRIPT]
program = subprocess.run(command, env=conftest.environment(), capture_output=True, text=True)
print("torch" in sys.modules, os.getppid(), os.getpid(), program.stdout, program.stderr)
"""


def test_a_process_of_xdist_is_forked_and_so_are_its_programs(tmp_path: Path):
    assert gateway_io.popen_bootstrapline == fork_server.TEST_WORKER[1]
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint('torch' in sys.modules, os.getppid(), os.getsid(0))")
    code = IN_A_TEST_WORKER.replace("SCRIPT", repr(str(script)))
    variables = environment()
    del variables["OMP_NUM_THREADS"]  # most users do not set it
    worker = subprocess.run(
        [sys.executable, "-u", *fork_server.TEST_WORKER],
        input=f"{code!r}\n", env=variables, timeout=60, capture_output=True, text=True, check=True,
    )  # fmt: skip
    is_forked, parent, pid, *of_program = worker.stdout.split()
    assert (is_forked, int(parent)) == ("True", os.getpid())
    assert of_program == ["True", pid, str(os.getsid(0))]
    assert worker.stderr == ""


IN_A_POD = """
import os, platform, socket, sys
from pathlib import Path
print("torch" in sys.modules)
print(os.getpid(), os.getppid(), os.getcwd(), sorted(os.listdir("/sys/class/net")))
print(socket.gethostname(), platform.node(), socket.gethostbyname(socket.gethostname()))
print(Path("/etc/resolv.conf").read_text(), Path("/proc/1/cmdline").exists())
sys.exit(9)
"""


@pytest.mark.skipif(bool(why := pods.why_not()), reason=why)
def test_process_1_of_a_pod_finds_what_it_finds_in_a_fresh_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    script = tmp_path / "script.py"
    script.write_text(IN_A_POD)
    said = []
    for is_forked in (True, False):
        with (
            monkeypatch.context() as patch,
            pods.cluster(tmp_path) as cluster,
            (tmp_path / "log").open("wb") as log,
        ):
            if not is_forked:
                patch.setattr(fork_server.Popen, "server", None)
            pod = cluster.start("pod-0", [sys.executable, str(script)], log, environment())
            assert pod.wait(60) == 9
        said.append((tmp_path / "log").read_text())
    assert [text.partition("\n")[0] for text in said] == ["True", "False"]
    forked, fresh = (text.partition("\n")[2] for text in said)
    assert forked == fresh
    assert forked.startswith("1 0 ")
    assert f"pod-0 pod-0 {cluster.address(2)}\n" in forked


def test_the_server_prints_nothing_while_it_imports(tmp_path: Path):
    """What a library says then would be missing in the output of the forked programs."""
    script = tmp_path / "script.py"
    script.write_text("print('done')")
    assert run(str(script)).stdout == "done\n"  # so the server has imported everything
    assert fork_server.Popen.server.printed == b""
