"""Real ranks that are stopped, under a real agent. In pods: labs/faults."""

import json
from pathlib import Path

import pytest

from library.tests.programs import run
from samestep.ranks import heartbeat

RANK = """
import math, os, signal, sys, time
from pathlib import Path
from samestep.ranks.heartbeat import Heartbeat

ranks_to_stop, note = sys.argv[1].split(","), Path(sys.argv[2], os.environ["RANK"])
has_been_here = note.exists()
note.touch()
heartbeat = Heartbeat()
for _ in range(10):
    heartbeat.beat(8)  # a busy machine keeps a rank waiting for seconds
    time.sleep(0.1)
if os.environ["RANK"] in ranks_to_stop and not has_been_here:
    os.kill(os.getpid(), signal.SIGSTOP)
heartbeat.beat(math.inf)
time.sleep(2)
"""

AGENT = """
import json, sys
from pathlib import Path
from torch.distributed.launcher.api import LaunchConfig
from samestep.node import agent
from samestep.ranks import heartbeat

heartbeat.MARGIN_S = 0.5
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
    assert "(timeout_s=8)" in ends[2]
    assert ends[3]  # the agent has printed it
    assert restarts == ["restarts", 0, "", False]
    assert well == ["well", 0, "", False]
    # Where one stopped later than the other, the agent ends it with that one.
    times = [done.stderr.count(f"rank {rank}: error: no progress for ") for rank in (0, 1)]
    assert sum(times) >= 2
    assert max(times) <= 2
    assert not list(temporary.glob("heartbeats-*"))


@pytest.mark.parametrize("folder", ["", "gone"])
def test_rank_writes_nothing_without_an_agent_that_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
):
    monkeypatch.setenv(heartbeat.FOLDER, folder and str(tmp_path / folder))
    heartbeat.Heartbeat().beat(1)
    assert not list(tmp_path.iterdir())
