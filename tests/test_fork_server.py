"""What only a forked program could do wrong. One of the two jobs of CI starts all of them fresh."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from execnet import gateway_io

from library.tests.programs import PATIENCE_S
from tests import fork_server
from tests.conftest import environment, run

pytestmark = [
    pytest.mark.program,
    pytest.mark.skipif(
        fork_server.Popen.server is None, reason="Linux only, and not with SAMESTEP_TESTS_FRESH=1"
    ),
]


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
    "by a negative exit code": ("sys.exit(-1)", 255),
    "by a chain of exceptions": ("try:\n    1 / 0\nexcept ArithmeticError:\n    int('x')", 1),
    "by Ctrl-C": ("os.kill(os.getpid(), 2); time.sleep(60)", -signal.SIGINT),
    "after atexit": ("atexit.register(print, 'bye'); print('hello'); sys.exit(4)", 4),
    "with a closed stdout": ("print('x', flush=True); sys.stdout.close(); os.close(1)", 0),
}
IMPORTS = "import atexit, os, sys, time\n"


@pytest.mark.parametrize(("code", "expected"), ENDINGS.values(), ids=ENDINGS)
def test_a_program_ends_as_in_a_fresh_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, expected: int
):
    script = tmp_path / "script.py"
    script.write_text(IMPORTS + code)
    forked, fresh = outcomes(script, monkeypatch)
    assert forked == fresh
    assert forked[0] == expected


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
        ([], {"RUN_ID": "mine", "PATH": "/nowhere"}, True),
        (["-X", "dev"], {}, False),
        ([], {"PYTHONHASHSEED": "1"}, False),
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


def test_ranks_of_torchrun_are_forked(tmp_path: Path):
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import os, sys\nprint(os.environ['RANK'], 'torch' in sys.modules, sys.argv, sys.path[0])\n"
    )
    options = ["--standalone", "--nproc-per-node=2", str(rank)]
    done = run("-m", "torch.distributed.run", *options, "0")
    said = f"True ['{rank}', '0'] {tmp_path}"
    assert sorted(done.stdout.splitlines()) == [f"0 {said}", f"1 {said}"]
    assert (done.returncode, done.stderr) == (0, "")


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


def test_the_rendezvous_names_its_methods_as_torch_does(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(METHOD_NAMES)
    done = run(str(script))
    assert (done.stdout, done.stderr) == ("join record\n" * 2 + "False\n", "")


IN_A_TEST_WORKER = """
import os, subprocess, sys
from unittest import mock
from tests import hooks
hooks.pytest_configure(mock.Mock())
command = [sys.executable, SCRIPT]
program = subprocess.run(command, env=hooks.environment(), capture_output=True, text=True)
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
        input=f"{code!r}\n", env=variables, capture_output=True, text=True, check=True,
        timeout=PATIENCE_S,
    )  # fmt: skip
    is_forked, parent, pid, *of_program = worker.stdout.split()
    assert (is_forked, int(parent)) == ("True", os.getpid())
    assert of_program == ["True", pid, str(os.getsid(0))]
    assert worker.stderr == ""


def test_the_server_prints_nothing_while_it_imports(tmp_path: Path):
    """What a library says then would be missing in the output of the forked programs."""
    script = tmp_path / "script.py"
    script.write_text("print('done')")
    assert run(str(script)).stdout == "done\n"  # so the server has imported everything
    assert fork_server.Popen.server.printed == b""
