"""torchrun's agents, one after the other. Real ranks: test_entrypoint.py."""

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher.api import LaunchConfig

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
