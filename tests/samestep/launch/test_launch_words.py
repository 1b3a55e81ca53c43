"""The arguments of the pods: the entry point understands them, and elastic pods meet by etcd."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.config.compose import check
from samestep.launch import cluster_environment
from tests.apiserver import serve
from tests.conftest import QUICK, ROOT, environment
from tests.faults.lab import free_port
from tests.launching import launch
from tests.samestep.launch.test_cluster_environment import RUNAI as RUNAI_VARIABLES
from tests.samestep.launch.test_cluster_environment import TRAINJOB
from tests.samestep.launch.test_targets import RUNAI, TARGETS, command, document, pod


@pytest.mark.parametrize(
    ("name", "given", "who", "endpoint"),
    [
        ("jobset", {"JOB_COMPLETION_INDEX": "1"}, "node 1 of 2", "cifar-node-0-0.cifar:29500"),
        ("pytorchjob", {"PET_NODE_RANK": "1", "PET_NNODES": "2"}, "node 1 of 2",
         "cifar-worker-0:29500"),
        ("kubeflow", TRAINJOB, "node 1 of 2", "cifar-node-0-0.cifar:29400"),
        ("runai", RUNAI_VARIABLES, "node 1 of 2", "cifar-master-0:23456"),
        ("runai-v1", RUNAI_VARIABLES, "node 1 of 2", "cifar-master-0:23456"),
        ("elastic", {}, "one of 1 to 4 nodes", "cifar-etcd:2379"),
        ("elasticjob", {}, "one of 1 to 2 nodes", "cifar-etcd:2379"),
    ],
)  # fmt: skip
def test_the_entry_point_understands_arguments_of_pods(name, given, who, endpoint, monkeypatch):
    """Together with the variables that the target's controller sets for the second pod."""
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "RUN_ID": "cifar", **given})
    words = command(name) if name in RUNAI else ["--", *pod(name)["spec"]["containers"][0]["args"]]
    options, overrides = cluster_environment.split_arguments(words[words.index("--") + 1 :])
    assert overrides[-len(TARGETS[name]) :] == TARGETS[name]
    plan, config = cluster_environment.plan(options, check(overrides))
    assert who in plan
    assert (config.rdzv_endpoint, config.nproc_per_node) == (endpoint, 2)
    assert config.max_restarts == check(overrides).cluster.max_restarts
    assert int(config.rdzv_configs["timeout"]) == 900


@pytest.mark.skipif(not shutil.which("etcd"), reason="apt-get install etcd-server")
def test_elastic_nodes_train_with_their_arguments_and_those_of_etcd(tmp_path: Path):
    """Processes take the place of pods; only ports and directories differ."""
    pytest.importorskip("etcd", reason="pip install project[elastic]")
    url, more = f"127.0.0.1:{free_port()}", ["cluster.min_nodes=2", "trainer.devices=1", *QUICK]
    here = {"0.0.0.0:2379": url, "cifar-etcd:2379": url, "/data/etcd": f"{tmp_path}/etcd"}
    here["timeout=900"] = "timeout=900,last_call_timeout=3"  # for the others; else 30

    def words(container):
        found = [*container.get("command", ()), *container["args"]]
        for there, place in here.items():
            found = [word.replace(there, place) for word in found]
        return found

    deployment = document("elastic", kind="Deployment")["spec"]["template"]["spec"]
    node = [sys.executable, "-m", "samestep.launch.entrypoint"]
    node += [*words(pod("elastic", *more)["spec"]["containers"][0]), f"run_root={tmp_path}"]
    etcd = words(deployment["containers"][0])
    etcd.append(f"--listen-peer-urls=http://127.0.0.1:{free_port()}")
    processes = [start(tmp_path, "etcd", etcd)]
    try:
        processes += [start(tmp_path, f"node-{number}", node) for number in range(2)]
        assert [process.wait(240) for process in processes[1:]] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert (tmp_path / "cifar/metrics.json").is_file()
    assert sorted(path.name for path in (tmp_path / "cifar/logs").glob("rank-*")) == [
        "rank-0.log",
        "rank-1.log",
    ]


def start(directory, name, words):
    variables = environment(RUN_ID="cifar", TERMINATION_LOG=f"{directory}/{name}.txt")
    with (directory / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            words, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
def test_an_elastic_run_that_failed_starts_again_with_an_empty_etcd(tmp_path: Path):
    """A failed run has closed its rendezvous in etcd, so nobody could join it again."""
    words = ["cluster=elastic", "cluster.image=ghcr.io/me/project:1.2.3"]
    with serve() as server:
        variables = {"KUBECONFIG": server.kubeconfig(tmp_path), "KUBECACHEDIR": str(tmp_path)}
        seen = []
        for _ in range(2):
            result = launch(*words, "action=submit", cwd=tmp_path, RUN_ID="mine", **variables)
            assert (result.returncode, result.stderr) == (0, "")
            (etcd,), (job,) = server.of_kind("Deployment"), server.of_kind("Job")
            seen.append(etcd["metadata"]["uid"])
            job["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    assert seen[0] != seen[1]
