"""When a rank is late, and real ranks that are stopped under a real agent. In pods: labs/faults."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from library.tests.kit import Clock
from library.tests.programs import run
from samestep import option_names
from samestep.node import hung_ranks
from samestep.ranks import heartbeat

RANK = """
import math, os, signal, sys, time
from pathlib import Path
from samestep.ranks.heartbeat import Heartbeat

ranks_to_stop, note = sys.argv[1].split(","), Path(sys.argv[2], os.environ["RANK"])
has_been_here = note.exists()
note.touch()
heartbeat = Heartbeat()
heartbeat.beat(math.inf)
while len(list(note.parent.iterdir())) < 2:
    time.sleep(0.01)
if os.environ["RANK"] in ranks_to_stop and not has_been_here:
    heartbeat.beat(1)
    os.kill(os.getpid(), signal.SIGSTOP)
heartbeat.beat(1000)
"""

AGENT = """
import json, sys
from pathlib import Path
from torch.distributed.launcher.api import LaunchConfig
from samestep.node import agent
from samestep.node import hung_ranks

hung_ranks.MARGIN_S = 0.5
script, directory = Path(sys.argv[1]), Path(sys.argv[2])
runs = [("ends", "0,1", 0), ("restarts", "0,1", 1), ("well", "", 0)]
for name, ranks_to_stop, max_restarts in runs:
    (directory / name).mkdir()
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id=name, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", local_addr="localhost", max_restarts=max_restarts,
        monitor_interval=0.1,
    )
    outcome = agent.launch(config, [str(script), ranks_to_stop, str(directory / name)])
    print(json.dumps([name, *outcome]), flush=True)
"""


@pytest.mark.program
def test_stopped_ranks_are_killed_and_restarted(tmp_path: Path):
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "agent.py").write_text(AGENT)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = run(
        str(tmp_path / "agent.py"), str(tmp_path / "rank.py"), str(tmp_path),
        TMPDIR=str(temporary),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ends, restarts, well = map(json.loads, done.stdout.splitlines())
    assert ends[:2] == ["ends", 1]
    assert "error: no progress for " in ends[2]
    assert "(timeout_s=1)" in ends[2]
    assert ends[3]  # the agent has printed it
    assert restarts == ["restarts", 0, "", False]
    assert well == ["well", 0, "", False]
    # Where one stopped later than the other, the agent ends it with that one.
    times = [done.stderr.count(f"rank {rank}: error: no progress for ") for rank in (0, 1)]
    assert sum(times) >= 2
    assert max(times) <= 2
    assert not list(temporary.glob("heartbeats-*"))


def test_a_rank_is_killed_when_its_own_watchdog_has_had_time_to_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    clock, killed = Clock(), []
    system = SimpleNamespace(getpid=lambda: 7, kill=lambda *what: killed.append(what))
    for module in (heartbeat, hung_ranks):
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "os", system)
    monkeypatch.setenv(heartbeat.FOLDER, str(tmp_path))
    beats, ranks = heartbeat.Heartbeat(), hung_ranks.HungRanks(tmp_path)
    workers: Any = SimpleNamespace(workers=[SimpleNamespace(id=7, global_rank=1)])
    failure: Any = SimpleNamespace(pid=7, error_file_data={"message": "none"})
    (tmp_path / "6").touch()  # of an earlier attempt
    clock.now += 1000  # it imports
    for _ in range(3):
        beats.beat(60)
        clock.now += 60 + hung_ranks.MARGIN_S
        ranks.end(workers)
    assert (killed, capsys.readouterr().err) == ([], "")
    assert [path.name for path in tmp_path.iterdir()] == ["7"]
    clock.now += 1
    for _ in range(2):
        ranks.end(workers)
    ranks.explain({1: failure})
    said = "error: no progress for 71 s (timeout_s=60); the files logs/rank-*.log of the run show "
    assert killed == [(7, signal.SIGKILL)]
    assert capsys.readouterr().err == f"rank 1: {said}where its ranks were\n"
    assert failure.error_file_data["message"]["message"] == f"{said}where its ranks were"


def test_a_rank_that_its_watchdog_has_ended_was_late_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = Clock()
    for module in (heartbeat, hung_ranks):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setenv(heartbeat.FOLDER, str(tmp_path))
    heartbeat.Heartbeat().beat(60)
    for passed, is_late in ((60, False), (1, True)):
        clock.now += passed
        failure: Any = SimpleNamespace(pid=os.getpid(), error_file_data={"message": "none"})
        hung_ranks.HungRanks(tmp_path).explain({1: failure})
        assert isinstance(failure.error_file_data["message"], dict) == is_late


def test_the_agent_names_an_option_as_its_ranks_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """It is a program of its own, which knows nothing of the front end of the script."""
    monkeypatch.setenv(heartbeat.FOLDER, str(tmp_path))
    monkeypatch.setattr(option_names, "_names", {"timeout_s": "cluster.timeout_s"})
    heartbeat.Heartbeat().beat(-1)
    monkeypatch.setattr(option_names, "_names", {})
    failure: Any = SimpleNamespace(pid=os.getpid(), error_file_data={"message": "none"})
    hung_ranks.HungRanks(tmp_path).explain({0: failure})
    assert "no progress for 0 s (cluster.timeout_s=-1)" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["", "gone"])
def test_rank_writes_nothing_without_an_agent_that_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
):
    monkeypatch.setenv(heartbeat.FOLDER, folder and str(tmp_path / folder))
    heartbeat.Heartbeat().beat(1)
    assert not list(tmp_path.iterdir())
