"""Settings of this machine, in configs/local, and runs on a cluster."""

import random
import shutil
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from samestep.errors import ConfigError
from samestep.hydra.compose import check
from samestep.launch.local_settings import write
from tests.conftest import ROOT, run

SETTINGS = """# @package _global_
defaults:
  - override /logger: tensorboard
cluster:
  image: ghcr.io/me/project:1.2.3
  volume: team's
  node_selector: {nvidia.com/gpu.product: A100}
trainer:
  devices: 2
data:
  root: /scratch/data
"""
SENT = [
    "cluster.image='ghcr.io/me/project:1.2.3'",
    "cluster.node_selector={nvidia.com/gpu.product: 'A100'}",
    r"cluster.volume='team\'s'",
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the launcher needs, with settings of this machine."""
    root = tmp_path_factory.mktemp("copy")
    for name in ("configs", "k8s", "src"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("local"))
    (root / "configs/local").mkdir()
    (root / "configs/local/default.yaml").write_text(SETTINGS)
    return root


def launch(root, *words):
    """Call the launcher of the copy, and return what it prints."""
    variables = {"PYTHONPATH": str(root / "src"), "KUBECONFIG": "/nowhere", "RUN_ID": "mine"}
    done = run("-m", "samestep", "launch", *words, cwd=root, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("cluster", ["local", "swarm", "flyte", "docker", "k8s", "elasticjob"])
def test_one_file_serves_all_clusters(copy, cluster):
    """Also ``python train.py``, which has no cluster: it ignores the keys that others have."""
    cfg = check([f"cluster={cluster}"], configs=copy / "configs")
    found = {key: cfg.cluster[key] for key in ("image", "volume") if key in cfg.cluster}
    assert cfg.data.root == "/scratch/data"
    values = {"image": "ghcr.io/me/project:1.2.3", "volume": "team's"}
    has = {"local": [], "swarm": ["image"], "flyte": ["image"], "docker": ["image"]}
    assert found == {key: values[key] for key in has.get(cluster, values)}


@pytest.mark.parametrize(
    ("settings", "words", "message"),
    [
        ("imagee: x", [], r"cluster.imagee=x: no such key.* \(configs/local/default.yaml\)"),
        ("image: x", ["cluster.image=y"], "cluster.image=y: no such key"),
        ("timeout_s: soon", [], "cluster.timeout_s=soon: must be"),
    ],
)
def test_mistakes_in_it_are_still_found(copy, tmp_path, settings, words, message):
    shutil.copytree(copy / "configs", tmp_path / "configs")
    file = tmp_path / "configs/local/default.yaml"
    file.write_text(f"# @package _global_\ncluster:\n  {settings}\n")
    with pytest.raises(ConfigError, match=message):
        check(words, configs=tmp_path / "configs")


def test_the_pods_get_its_keys_of_cluster_and_nothing_else_of_it(copy):
    *_, job = yaml.safe_load_all(launch(copy, "cluster=k8s", "seed=1"))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"][-5:] == [*SENT, "cluster=k8s", "seed=1"]
    assert container["image"] == "ghcr.io/me/project:1.2.3"
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "A100"}
    # The manifest is of what the pods compose, who do not have the file.
    assert "--nproc-per-node=1" in container["args"]
    cfg = check(container["args"][-5:])
    assert (cfg.cluster.volume, cfg.trainer.devices) == ("team's", 1)
    assert cfg.cluster.node_selector == {"nvidia.com/gpu.product": "A100"}


def test_a_value_on_the_command_line_counts_more(copy):
    stack = yaml.safe_load(launch(copy, "cluster=swarm", "cluster.image=ours:2"))
    node = stack["services"]["node-0"]
    assert node["image"] == "ours:2"
    assert node["command"][-2:] == ["cluster=swarm", "cluster.image=ours:2"]


def test_check_says_what_does_not_reach_the_pods(copy):
    said = launch(copy, "cluster=k8s", "cluster.volume=team", "action=check")
    line = "configs/local/default.yaml: the pods get its keys of cluster, but not "
    assert f"{line}data.root, defaults, trainer.devices\n" in said


def test_hydra_reads_what_is_written():
    generator = random.Random(0)
    for _ in range(300):
        text = "".join(generator.choices([*"\\\\\\'''\"$[]{},:= ab1"], k=generator.randint(0, 8)))
        value = [text, {"a.b/c": text}, 1, None, True, 1.5]
        override = OverridesParser.create().parse_override(f"cluster.x={write(value)}")
        assert override.value() == value, text
