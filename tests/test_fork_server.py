"""What only a forked program could do wrong. One of the two jobs of CI starts all of them fresh."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fork_server
from tests.conftest import environment, run

needs_server = pytest.mark.skipif(
    fork_server.Popen.server is None, reason="Linux only, and not with SAMESTEP_TESTS_FRESH=1"
)


@pytest.mark.parametrize(
    ("argv", "options", "is_forked"),
    [
        (["script.py", "x"], {}, True),
        (["-u", "script.py"], {"stdout": -1, "text": True}, True),
        (["-m", "samestep", "runs"], {}, True),
        (["-m", "pip"], {}, False),
        (["-c", "print(1)"], {}, False),
        (["-X", "dev", "script.py"], {}, False),
        (["missing.py"], {}, False),
        (["script.py"], {"preexec_fn": os.getpid}, False),
        (["script.py"], {"env": {"PYTHONHASHSEED": "1"}}, False),
        (["script.py"], {"env": {"RUN_ID": "mine", "PYTHONPATH": "/nowhere"}}, True),
    ],
)
def test_new_interpreter_wherever_a_fork_would_differ(
    tmp_path: Path, argv: list[str], options: dict[str, object], is_forked: bool
):
    tmp_path.joinpath("script.py").touch()
    server = fork_server.ForkServer({})
    call = {"cwd": tmp_path, "env": {}} | options
    program = fork_server.Program.from_call([sys.executable, *argv], call)
    assert (program is not None and server.accepts(program)) == is_forked


def test_process_that_was_forked_by_the_owner_cannot_use_its_server(tmp_path: Path):
    tmp_path.joinpath("script.py").touch()
    server = fork_server.ForkServer({})
    server.owner += 1
    call = {"cwd": tmp_path, "env": {}}
    program = fork_server.Program.from_call([sys.executable, "script.py"], call)
    assert program
    assert not server.accepts(program)


def outcomes(script: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of a script: forked first, then in a new interpreter."""
    forked = run(str(script), cwd=script.parent)
    with monkeypatch.context() as patch:
        patch.setattr(fork_server.Popen, "server", None)
        fresh = run(str(script), cwd=script.parent)
    return [(done.returncode, done.stdout, done.stderr) for done in (forked, fresh)]


ENDINGS = {
    "at its last line": ("print('done')", 0),
    "by a negative exit code": ("sys.exit(-1)", 255),
    "by a message": ("sys.exit('a message')", 1),
    "by a chain of exceptions": ("try:\n    1 / 0\nexcept ArithmeticError:\n    int('x')", 1),
    "by its hook": ("sys.excepthook = lambda *_: sys.exit(3)\nint('x')", 3),
    "by Ctrl-C": ("os.kill(os.getpid(), 2); time.sleep(60)", -signal.SIGINT),
    "after atexit": ("atexit.register(print, 'bye'); print('hello'); sys.exit(4)", 4),
    "after its threads": ("threading.Timer(0.1, print, ['late']).start(); print('soon')", 0),
    "by another program": (
        "print('before', flush=True); atexit.register(print, 'not here')\n"
        "code = 'import sys; print(sys.argv); sys.exit(6)'\n"
        "os.execv(sys.executable, [sys.executable, '-c', code, 'x'])", 6,
    ),
    "with a closed stdout": ("print('x', flush=True); sys.stdout.close(); os.close(1)", 0),
}  # fmt: skip
IMPORTS = "import atexit, os, sys, threading, time\n"


@needs_server
@pytest.mark.program
@pytest.mark.parametrize(("code", "expected"), ENDINGS.values(), ids=ENDINGS)
def test_program_ends_as_in_a_new_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, expected: int
):
    script = tmp_path / "script.py"
    script.write_text(IMPORTS + code)
    forked, fresh = outcomes(script, monkeypatch)
    assert forked == fresh
    assert forked[0] == expected


SURROUNDINGS = """
import os, sys
names = {os.getpid(): "itself"}
print(os.getppid(), names.get(os.getpgid(0), os.getpgid(0)), names.get(os.getsid(0), os.getsid(0)))
print(os.getcwd(), sys.argv, sys.path, sys.stdin.read(), sorted(os.environ))
print(sorted({name.split(".")[0] for name in sys.modules} & {"project", "samestep", "tests"}))
"""


@needs_server
@pytest.mark.program
@pytest.mark.parametrize("new_session", [False, True])
def test_program_has_the_surroundings_of_a_new_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_session: bool
):
    (tmp_path / "script.py").write_text(SURROUNDINGS)
    seen = []
    for server in (fork_server.Popen.server, None):
        monkeypatch.setattr(fork_server.Popen, "server", server)
        done = subprocess.run(
            [sys.executable, "script.py", "an argument"], cwd=tmp_path, env=environment(A="b"),
            input="given", capture_output=True, text=True, check=True,
            start_new_session=new_session,
        )  # fmt: skip
        seen.append(done.stdout)
    assert seen[0] == seen[1]
    group = "itself itself" if new_session else f"{os.getpgid(0)} {os.getsid(0)}"
    assert seen[0].startswith(f"{os.getpid()} {group}\n{tmp_path} ")


@needs_server
@pytest.mark.program
def test_each_program_draws_its_own_random_numbers(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import random, numpy, torch\n"
        "print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    )
    first, second = (run(str(script)).stdout.split() for _ in range(2))
    assert set(first).isdisjoint(second)


@needs_server
@pytest.mark.program
def test_ranks_of_torchrun_are_forked_and_its_children(tmp_path: Path):
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import os, sys\nprint(os.environ['RANK'], 'torch' in sys.modules, sys.argv, os.getppid())"
    )
    options = ["--standalone", "--nproc-per-node=2", str(rank), "0"]
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    with subprocess.Popen(command, env=environment(), stdout=-1, stderr=-1, text=True) as agent:
        stdout, stderr = agent.communicate()
    said = f"True ['{rank}', '0'] {agent.pid}"
    assert sorted(stdout.splitlines()) == [f"0 {said}", f"1 {said}"]
    assert (agent.returncode, stderr) == (0, "")


METHOD_NAMES = """
import importlib.util
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as ours
spec = importlib.util.find_spec(ours.__name__)
theirs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(theirs)
def record():
    for module in ours, theirs:
        print(module.get_method_name(), module.get_method_name(1))
def join():
    record()
join()
print(ours.get_method_name.__code__ == theirs.get_method_name.__code__)
"""


@needs_server
@pytest.mark.program
def test_rendezvous_names_its_methods_as_torch_does(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(METHOD_NAMES)
    done = run(str(script))
    assert (done.stdout, done.stderr) == ("join record\n" * 2 + "False\n", "")


@needs_server
@pytest.mark.program
def test_libraries_print_nothing_while_the_server_imports_them():
    """The output of the forked programs would lack it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    command = [sys.executable, fork_server.__file__]
    with theirs:
        server = subprocess.run(
            command, stdin=theirs, env=environment(), capture_output=True, check=True
        )
    assert server.stdout + server.stderr == b""
