"""Docker, with Swarm and without, and the server of the data that is part of the stack."""

import json
import os
import random
import shutil
import subprocess
import sys
import urllib.request
from contextlib import suppress

import pytest
import yaml

from library.tests.programs import until
from samestep.hydra.compose import check
from samestep.launch import render
from tests import mirror
from tests.conftest import NO_PICTURES, free_port, run
from tests.launching import launch, samestep

UNEQUAL = "cluster.devices_per_node=[1,2]"
WITHOUT_SWARM = ("cluster=swarm", "cluster.manifest=docker")
needs_docker = pytest.mark.skipif(not shutil.which("docker"), reason="needs Docker's client")


def rendered(*words, run_id="cifar"):
    cfg = check(words)
    cfg.run_id = run_id
    return render.text(render.render(cfg, words))


def stack(*words):
    return yaml.safe_load(rendered("cluster=swarm", *words))


def test_each_node_has_its_own_number_of_processes_and_gpus():
    services = stack("cluster.devices_per_node=[1,2,4]")["services"]
    assert list(services) == ["node-0", "node-1", "node-2", "data"]
    for rank, devices in enumerate([1, 2, 4]):
        node = services[f"node-{rank}"]
        words = {f"--node-rank={rank}", f"--nproc-per-node={devices}", "--nnodes=3"}
        assert words < {*node["command"], "--master-addr=node-0"}
        assert node["hostname"] == f"node-{rank}"
        assert node["deploy"]["placement"]["constraints"] == [f"node.labels.project == {rank}"]
        (gpus,) = node["deploy"]["resources"]["reservations"]["generic_resources"]
        assert gpus == {"discrete_resource_spec": {"kind": "NVIDIA-GPU", "value": devices}}


def test_without_gpus_none_is_reserved():
    node = stack("trainer.accelerator=cpu")["services"]["node-0"]
    assert node["deploy"]["resources"] == {"limits": {"memory": "16g"}}
    assert "NVIDIA_VISIBLE_DEVICES=void" in node["environment"]
    assert "capabilities" not in rendered(*WITHOUT_SWARM, "trainer.accelerator=cpu")


def test_secrets_are_named_and_never_shown():
    found = stack("cluster.secrets=[netrc,aws]")
    assert found["services"]["node-0"]["secrets"] == [
        {"source": "secret-0", "target": "netrc"},
        {"source": "secret-1", "target": "aws"},
    ]
    assert found["secrets"]["secret-1"] == {"name": "aws", "external": True}
    assert "secrets" not in stack()
    assert "secrets" not in stack()["services"]["node-0"]
    without = launch(*WITHOUT_SWARM, "--render", WANDB_API_KEY="0123456789abcdef")
    assert "- WANDB_API_KEY\n" in without.stdout
    assert "0123456789abcdef" not in without.stdout


@pytest.mark.program
@needs_docker
@pytest.mark.parametrize(
    "words",
    [
        [],
        [UNEQUAL, "cluster.secrets=[netrc]"],
        ["cluster.runs={type: nfs, o: 'addr=10.0.0.5,rw', device: ':/runs'}"],
        # The format of stacks does not know how Compose asks for GPUs.
        ["cluster.manifest=docker", UNEQUAL, "trainer.accelerator=cpu"],
    ],
)
def test_docker_accepts_the_file(words):
    result = docker_config(rendered("cluster=swarm", *words))
    assert result.returncode == 0, result.stderr


@pytest.mark.program
@needs_docker
def test_the_processes_get_the_overrides_as_typed():
    """Through OmegaConf, YAML and Docker's interpolation; its output loses a first line break."""
    generator = random.Random(0)
    pieces = [*"${}()\\\t\"':=#- ", "${", "$(", "$$", "\\${", "é", "データ", "HOME", "null", "1"]
    words = ["".join(generator.choices(pieces, k=generator.randint(1, 12))) for _ in range(300)]
    cfg = check(["cluster=swarm"])
    cfg.run_id = "cifar"
    result = docker_config(render.text(render.render(cfg, words)))
    assert result.returncode == 0, result.stderr
    found = yaml.load(result.stdout, yaml.BaseLoader)  # a lone = is text
    command = found["services"]["node-0"]["command"]
    assert command[-300:] == words


def docker_config(text):
    """What Docker makes of a stack file, without a daemon."""
    command = ["docker", "stack", "config", "--compose-file=-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


@pytest.fixture
def fake_docker(tmp_path, monkeypatch):
    """A ``docker`` that writes down what it is told; stacks have two services.

    The files ``service``, ``secret`` and ``config`` have the labels of what there is, and with a
    file ``away`` every command fails.
    """
    script = tmp_path / "bin" / "docker"
    script.parent.mkdir()
    script.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\nfrom pathlib import Path\n"
        "text = sys.stdin.read() if '--compose-file=-' in sys.argv else ''\n"
        f"print(json.dumps([sys.argv[1:], text]), file=open({str(tmp_path / 'told')!r}, 'a'))\n"
        "if 'services' in sys.argv: print('a1\\nb2')\n"
        f"file = Path({str(tmp_path)!r}, sys.argv[1])\n"
        "if file.with_name('away').exists(): sys.exit('this node is no manager')\n"
        "if file.exists(): print('c3' if 'ls' in sys.argv else file.read_text())\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")

    def told():
        calls = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
        return [call for call in calls if not {"ls", "inspect"}.intersection(call[0])]

    return told


@pytest.mark.program
def test_the_actions_are_commands_of_docker(fake_docker, tmp_path):
    """Those on a run find it by its name alone."""
    words = ["cluster=swarm", "cluster.image=ours:1", "trainer.max_epochs=2"]
    for line in (["launch", *words], ["status", "cifar"], ["logs", "cifar"], ["cancel", "cifar"]):
        result = samestep(*line, cwd=tmp_path, RUN_ID="cifar")
        assert result.returncode == 0, result.stderr
    calls = fake_docker()
    (submit, text), (status, _), *logs, (cancel, _) = calls
    assert (submit[:2], submit[-1]) == (["stack", "deploy"], "cifar")
    assert text == rendered(*words)
    assert (status[:2], status[-1]) == (["stack", "ps"], "cifar")
    assert (cancel, len(logs)) == (["stack", "rm", "cifar"], 3)
    assert logs[0][0][-3:] == ["--filter", "name=cifar_node", "cifar"]
    assert sorted(call[-1] for call, _ in logs[1:]) == ["a1", "b2"]


@pytest.mark.program
@pytest.mark.parametrize("kind", ["service", "secret", "config"])
def test_what_is_found_are_the_labels_of_all_that_a_stack_has(fake_docker, tmp_path, kind):
    (tmp_path / kind).write_text('{"com.docker.stack.namespace": "web"}')
    for line in (["launch"], ["cancel", "web"]):
        words = [*line, "cluster=swarm", "cluster.image=ours:1"]
        result = samestep(*words, cwd=tmp_path, RUN_ID="web")
        assert result.returncode == 2
        assert "web: the cluster has another object web" in result.stderr
    assert fake_docker() == []
    labels = {"samestep/run": "web", "samestep/project": "project", "samestep/target": "swarm"}
    (tmp_path / kind).write_text(json.dumps(labels))
    result = samestep("cancel", "web", "cluster=swarm", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert [call for call, _ in fake_docker()] == [["stack", "rm", "web"]]
    (tmp_path / "away").touch()
    result = samestep("cancel", "web", "cluster=swarm", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (1, "this node is no manager\n")
    assert len(fake_docker()) == 1


@pytest.mark.program
def test_without_docker_the_command_is_shown(tmp_path):
    result = samestep("status", "cifar", "cluster=swarm", cwd=tmp_path, PATH="/nowhere")
    assert result.returncode == 1
    assert "docker: no such command" in result.stderr
    assert "docker stack ps --no-trunc cifar" in result.stderr


@pytest.fixture
def data_server(tmp_path):
    """A folder filled by scripts/prepare_data.py, served by the command of the stack."""
    (tmp_path / "official").mkdir()
    miniature = mirror.mnist(tmp_path / "official")
    team = tmp_path / "team"
    with mirror.serve(tmp_path / "official") as official:
        words = miniature.overrides(team, official.url)
        filled = run("scripts/prepare_data.py", *words)
        assert filled.returncode == 0, filled.stderr
    port = free_port()
    command = stack()["services"]["data"]["entrypoint"]
    place = {"python": sys.executable, "8000": str(port), "/data": str(team)}
    command = [place.get(word, word) for word in command]
    with (
        (tmp_path / "server.log").open("w") as log,
        subprocess.Popen(
            [place.get(word, word) for word in command], stdout=log, stderr=log
        ) as job,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: answers(url))
            yield miniature, f"{url}/MNIST/raw"
        finally:
            job.terminate()


def answers(url):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with suppress(OSError):
        opener.open(url).close()
        return True
    return False


@pytest.mark.program
def test_a_run_fetches_from_the_data_server(data_server, tmp_path):
    miniature, url = data_server
    words = [
        *miniature.overrides(tmp_path / "here", url), "cluster=swarm", "data.download=true",
        "trainer.max_epochs=1", "model=mlp",
        "trainer.accelerator=cpu", f"run_root={tmp_path / 'runs'}", "report=false", NO_PICTURES,
    ]  # fmt: skip
    done = run("train.py", *words, RUN_ID="first", no_proxy="127.0.0.1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "first" / "metrics.json").exists()
    raw = tmp_path / "here/MNIST/raw"
    sums = {name: mirror.md5((raw / name).read_bytes()) for name in miniature.archives}
    assert sums == miniature.archives
