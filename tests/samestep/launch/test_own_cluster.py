"""A cluster file of one's own in configs/cluster, and configs/local on clusters."""

import shutil
from pathlib import Path

import pytest
import yaml

from samestep.errors import ConfigError
from samestep.hydra.compose import check
from tests.conftest import ROOT, run

MINE = """defaults: [k8s, _self_]
image: ghcr.io/me/project:1.2.3
volume: team's
node_selector: {nvidia.com/gpu.product: A100}
"""
OF_THIS_MACHINE = """# @package _global_
defaults: [override /trainer: gpu]
trainer: {devices: 2}
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what the launcher needs, with a cluster and settings of this machine."""
    for name in ("configs", "examples", "k8s", "src"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("local"))
    (tmp_path / "configs/cluster/mine.yaml").write_text(MINE)
    (tmp_path / "configs/local").mkdir()
    (tmp_path / "configs/local/default.yaml").write_text(OF_THIS_MACHINE)
    return tmp_path


@pytest.mark.program
def test_a_cluster_file_of_ones_own_needs_no_typed_names(copy: Path):
    """The manifest is of what the pods compose: they do not have configs/local."""
    variables = {"PYTHONPATH": f"{copy}:{copy / 'src'}", "KUBECONFIG": "/nowhere", "RUN_ID": "mine"}
    done = run(
        "-m", "samestep", "launch", "--render", "cluster=mine", "seed=1", cwd=copy, **variables
    )
    assert (done.returncode, done.stderr) == (0, "")
    *_, job = yaml.safe_load_all(done.stdout)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"][-2:] == ["cluster=mine", "seed=1"]
    assert container["image"] == "ghcr.io/me/project:1.2.3"
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "A100"}
    assert "--nproc-per-node=1" in container["args"]


def test_keys_of_a_cluster_are_checked_in_every_file(copy: Path, monkeypatch):
    monkeypatch.setenv("SAMESTEP_PROJECT", str(copy))
    assert check(["cluster=mine"]).trainer.devices == 2
    (copy / "configs/local/default.yaml").write_text("# @package _global_\ncluster: {imagee: x}\n")
    with pytest.raises(ConfigError, match=r"cluster.imagee=x: no such key.*local/default.yaml\)"):
        check(["cluster=mine"])
