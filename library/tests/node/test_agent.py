"""torchrun's agents, one after the other. Real ranks: test_entrypoint.py."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher.api import LaunchConfig

from library.tests.programs import environment, run
from samestep.node import agent
from samestep.node.outcome import Outcome


def test_an_etcd_that_is_lost_while_ranks_are_assigned_is_one_restart(
    monkeypatch: pytest.MonkeyPatch,
):
    etcd = pytest.importorskip("etcd", reason="pip install python-etcd")
    from samestep.node import etcd_rendezvous

    config = LaunchConfig(
        min_nodes=1, max_nodes=2, nproc_per_node=1, rdzv_backend="etcd-v2", run_id="mine",
        rdzv_endpoint="127.0.0.1:1", rdzv_configs={"join_timeout": "1"}, max_restarts=2,
    )  # fmt: skip
    errors = [etcd.EtcdException("lost"), LookupError("lost")]

    def run(self: LocalElasticAgent) -> RunResult:
        if errors:
            raise errors.pop()
        return RunResult(WorkerState.SUCCEEDED)

    monkeypatch.setattr(LocalElasticAgent, "run", run)
    by_etcd = agent.Rendezvous(etcd_rendezvous.EtcdRendezvous, etcd_rendezvous.is_loss)
    assert agent.launch(config, ["script.py"], by_etcd) == Outcome(0)
    errors = [etcd.EtcdException("lost")] * 3
    with pytest.raises(etcd.EtcdException):
        agent.launch(config, ["script.py"], by_etcd)


def test_all_ranks_and_starts_have_the_same_hash_seed(monkeypatch: pytest.MonkeyPatch):
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="mine", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
    )  # fmt: skip
    seeds = []

    def run(self: LocalElasticAgent) -> RunResult:
        seeds.append(os.environ["PYTHONHASHSEED"])
        return RunResult(WorkerState.SUCCEEDED)

    monkeypatch.setattr(LocalElasticAgent, "run", run)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert agent.launch(config, ["script.py"]) == Outcome(0)
    monkeypatch.delenv("PYTHONHASHSEED")
    assert agent.launch(config, ["script.py"]) == Outcome(0)
    # Another one than the user's own would be a surprise.
    assert seeds == ["7", "0"]


SOME_FAIL = """
import os, time
from samestep.errors import ConfigError
from samestep.ranks.failure import ErrorHook

ErrorHook.install()
if os.environ["LOCAL_RANK"] in os.environ["WRONG"]:
    raise ConfigError("lr=-1: must be above 0")
time.sleep(1000)
"""


@pytest.mark.program
@pytest.mark.parametrize("wrong", ["0", "1", "01"])
def test_an_error_of_the_first_ranks_is_printed_once(tmp_path: Path, wrong: str):
    """Until the ranks meet all raise the same, and the agent ends those that have not yet."""
    (tmp_path / "script.py").write_text(SOME_FAIL)
    words = ["-m", "samestep", "run", "--nproc-per-node=2", "script.py"]
    done = run(*words, cwd=tmp_path, WRONG=wrong)
    assert (done.returncode, done.stderr) == (2, "error: lr=-1: must be above 0\n")


PROGRAM = """
import json, sys
from samestep.errors import ConfigError
from samestep.node import agent

def main():
    try:
        print(json.dumps([__package__ or "", sys.flags.optimize, sys.argv[1:]]))
        print(json.dumps(agent.this_program()))
    except ConfigError as error:
        print(json.dumps(str(error)))

if __name__ == "__main__":
    main()
"""
COMMANDS = [  # of Python, whose ranks run the same program
    "script.py a b",
    "-O -W ignore script.py a",
    "-m cProfile -o prof script.py a b",
    "-m trace --count --coverdir=cover script.py a",
    "-m trace --trackcalls --module package.module a",
    "-m cProfile -o prof -m package.module a",
    "-m pdb -c continue script.py a",
    "-m pdb -c continue -m package.module a",
    "-m package.module a",
    "-m package a",
    "package/__main__.py a",
    "package a",
    "package.zip a",
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    (folder / "package").mkdir()
    for name in ("script.py", "package/__init__.py", "package/module.py", "package/__main__.py"):
        (folder / name).write_text("" if name.endswith("__init__.py") else PROGRAM)
    with zipfile.ZipFile(folder / "package.zip", "w") as archive:
        archive.writestr("__main__.py", PROGRAM)
    return folder


@pytest.mark.program
@pytest.mark.parametrize("command", COMMANDS)
def test_ranks_run_the_same_program(programs: Path, command: str):
    done = run(*command.split(), cwd=programs)
    # A debugger and a profiler print lines of their own.
    printed = [line for line in done.stdout.splitlines() if line.startswith("[")]
    start, program = map(json.loads, printed[:2])
    again = run(*program, cwd=programs)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout.splitlines()[0]) == start


@pytest.mark.program
@pytest.mark.parametrize("words", [["-"], ["-c", "import script; script.main()"]])
def test_a_program_without_a_file_cannot_be_run_again(programs: Path, words: list[str]):
    done = subprocess.run(
        [sys.executable, *words], input="import script; script.main()", cwd=programs,
        env=environment(), text=True, capture_output=True, check=True,
    )  # fmt: skip
    assert "it is a notebook, python -c or stdin; save it as a script" in done.stdout


@pytest.mark.program
def test_a_trainer_in_a_thread_finds_its_program(programs: Path):
    code = "import threading, script\nthreading.Thread(target=script.main).start()\n"
    (programs / "threaded.py").write_text(code)
    done = run("threaded.py", "a", cwd=programs)
    assert json.loads(done.stdout.splitlines()[1]) == [str(programs / "threaded.py"), "a"]
