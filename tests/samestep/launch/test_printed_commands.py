"""The commands that docs/ print for Swarm and elastic pods, executed. Docker: test_swarm.py.

Each container is a network namespace with its own process 1, name and DNS. It gets the arguments
and the variables that were rendered from the printed command. Only the run is made small.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from library.tests import pods
from library.tests.programs import PATIENCE_S
from samestep.hydra.compose import check
from samestep.launch import render
from tests.conftest import NO_PICTURES, ROOT, environment, final_metrics
from tests.printed_commands import Command, find_commands

ENTRYPOINT = [sys.executable, "-m", "samestep.launch.entrypoint"]
SMALL = [
    "trainer.accelerator=cpu", "trainer.max_epochs=1", "model=mlp",
    NO_PICTURES, "report=false",
]  # fmt: skip
WHY_NOT = pods.why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def find_printed(page: str, cluster: str) -> Command:
    """The command of a page that starts a run on this cluster."""
    commands = [command for block in find_commands(ROOT / page) for command in block]
    return next(
        command
        for command in commands
        if f"cluster={cluster}" in command.arguments and "cluster.image=$IMAGE" in command.arguments
    )


def rendered(command: Command, *more: str):
    """The documents of a printed command."""
    words = [word.replace("$IMAGE", "ours:1") for word in command.arguments]
    words = [word for word in words if not word.startswith("--")] + [*SMALL, *more]
    cfg = check(words)
    cfg.run_id = command.variables["RUN_ID"]
    return cfg, render.render(cfg, words)


def start(cluster: pods.Cluster, tmp_path: Path, name: str, arguments: list[str], **variables: str):
    """Start the entry point as process 1 of a container; the folder of the runs is shared."""
    with (tmp_path / f"{name}.log").open("wb") as log:
        return cluster.start(
            name, [*ENTRYPOINT, *arguments, f"run_root={tmp_path}"], log,
            environment(TERMINATION_LOG=f"{tmp_path}/message-{name}", **variables),
        )  # fmt: skip


def read_logs(tmp_path: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))


def end_well(containers, tmp_path: Path, num_ranks: int) -> None:
    """All containers end with 0, and as many ranks as this took part in the run."""
    assert [container.wait(PATIENCE_S) for container in containers] == [0] * len(containers), (
        read_logs(tmp_path)
    )
    assert final_metrics(tmp_path / "mine")["test/accuracy"] > 0.1
    assert len(list((tmp_path / "mine" / "logs").glob("rank-*.log"))) == num_ranks


@pytest.mark.program
def test_the_stack_of_swarm_trains_on_unequal_nodes(tmp_path: Path):
    _, (stack,) = rendered(find_printed("docs/clusters/swarm.md", "swarm"))
    # Docker replaces $$ by $; the text passes through YAML, as it does there.
    services = yaml.safe_load(yaml.safe_dump(stack).replace("$$", "$"))["services"]
    nodes = [service for name, service in services.items() if name.startswith("node-")]
    with pods.cluster(tmp_path) as cluster:
        containers = []
        for number, node in enumerate(nodes):
            # endpoint_mode=dnsrr: the name of a service is the address of its container.
            cluster.records[f"node-{number}.{pods.DOMAIN}"] = cluster.address(2 + number)
            variables = dict(word.split("=", 1) for word in node["environment"])
            name = node["hostname"]
            containers.append(start(cluster, tmp_path, name, node["command"], **variables))
        end_well(containers, tmp_path, num_ranks=3)
    assert variables["RUN_ID"] == "mine"


@pytest.mark.skipif(not shutil.which("etcd"), reason="apt-get install etcd-server")
def test_the_command_of_elastic_pods_trains_on_two(tmp_path: Path):
    """Of up to four. Pods that join and leave: tests/labs/test_elastic.py."""
    pytest.importorskip("etcd", reason="pip install project[elastic]")
    _, documents = rendered(find_printed("docs/clusters/elastic.md", "elastic"))
    containers = {}
    for document in documents:
        if document["kind"] not in ("NetworkPolicy", "Service"):
            container = document["spec"]["template"]["spec"]["containers"][0]
            containers[container["name"]] = container
    etcd, worker = containers["etcd"], containers["elasticjob-worker"]
    variables = {item["name"]: item["value"] for item in worker["env"] if "value" in item}
    # It trains with one until there are more. Here it waits for two, however late one is.
    arguments = [
        word.replace("--nnodes=1:", "--nnodes=2:").replace("=900", "=900,last_call_timeout=1")
        for word in worker["args"]
    ]
    with pods.cluster(tmp_path) as cluster:
        cluster.records[f"mine-etcd.{pods.DOMAIN}"] = cluster.address(2)
        server = [*etcd["command"], *etcd["args"]]
        server = [word.replace("/data/etcd", f"{tmp_path}/etcd") for word in server]
        with (tmp_path / "etcd.log").open("wb") as log:
            cluster.start("mine-etcd", server, log, dict(os.environ))
        workers = [start(cluster, tmp_path, f"w{n}", arguments, **variables) for n in (0, 1)]
        end_well(workers, tmp_path, num_ranks=2)
