"""torchrun's agents, one after the other. Real ranks: test_entrypoint.py."""

import os
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher.api import LaunchConfig

from library.tests.canaries import check_sources
from library.tests.programs import run
from samestep.node import agent
from samestep.node.outcome import Outcome


def test_canary_the_agent_of_torch_still_asks_how_its_ranks_are():
    asks = "self._monitor_workers(self._worker_group)"
    check_sources([(SimpleElasticAgent._invoke_run, [asks])])


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
