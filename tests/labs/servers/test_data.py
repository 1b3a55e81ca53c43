"""The volume of the runs: ``samestep launch --data`` makes its claim, and fills it in a pod."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import mirror
from tests.conftest import ROOT, environment
from tests.labs.servers.conftest import Cluster

pytestmark = pytest.mark.servers
NEW = ["cluster.volume=data", "cluster.volume_size=1Gi"]


@pytest.fixture
def roomy(cluster: Cluster) -> Iterator[Cluster]:
    """A namespace with room for the claim ``data``, whose pods execute what a container would."""
    name = f"{cluster.namespace}-data"
    volume = {
        "accessModes": ["ReadWriteMany"], "capacity": {"storage": "1Gi"},
        "hostPath": {"path": str(cluster.folder)}, "persistentVolumeReclaimPolicy": "Delete",
        "claimRef": {"namespace": cluster.namespace, "name": "data"},
    }  # fmt: skip
    cluster.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}}
        | {"spec": volume}
    )
    variables = f"PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={environment()['PYTHONPATH']}"
    cluster.pods_do(f'cd {ROOT}; export {variables}; eval "exec $WORDS"')
    yield cluster
    cluster.delete("persistentvolumes", name)


def test_a_new_claim_is_filled_and_stays(roomy: Cluster) -> None:
    official, root = roomy.folder / "official", roomy.folder / "volume"
    official.mkdir()
    miniature = mirror.mnist(official)
    with mirror.serve(official) as server:
        words = [
            *roomy.words("k8s"),
            *NEW,
            *miniature.overrides(root, server.url),
        ]
        failed = roomy.samestep("launch", "--data", *words, "data.global_batch_size=many")
        assert failed.returncode == 2  # nobody was asked
        assert not roomy.left()
        first = roomy.samestep("launch", "--data", *words)
        assert first.returncode == 0, first.stdout + first.stderr
        # A pod that waits for its place is named before.
        assert "data-mnist: Complete" in first.stderr
        assert "persistentvolumeclaim/data created" in first.stdout
        assert "/trainer] ready: data=mnist train_set=180 val_set=20 test_set=50" in first.stdout
        raw = root / "MNIST/raw"
        found = {name: mirror.md5((raw / name).read_bytes()) for name in miniature.archives}
        assert found == miniature.archives

    roomy.pods_do("echo error: no route to host; exit 2")
    failed = roomy.samestep("launch", "--data", *words)
    assert failed.returncode == 1
    assert "the claim data exists, and stays as it is" in failed.stdout
    assert "/trainer] error: no route to host" in failed.stdout
    cancelled = roomy.samestep("cancel", "data-mnist", *words)
    assert (cancelled.returncode, cancelled.stderr) == (0, "")
    assert not roomy.left()
    assert roomy.get("persistentvolumeclaims", "data")["status"]["phase"] == "Bound"


def test_check_asks_for_a_claim_only_if_there_is_none(cluster: Cluster) -> None:
    words = ["--check", *cluster.words("k8s"), "cluster.volume_size=9Gi"]
    there = cluster.samestep("launch", *words, RUN_ID="mine")
    assert (there.returncode, there.stderr) == (0, "")
    assert "the claim project exists, and stays as it is" in there.stdout
    wrong = ["cluster.volume=other", "cluster.storage_class=A B"]
    missing = cluster.samestep("launch", *words, *wrong, RUN_ID="mine")
    assert missing.returncode == 2
    assert "storageClassName" in missing.stderr
    assert cluster.samestep("launch", *words, wrong[0], RUN_ID="mine").returncode == 0
    assert len(cluster.get("persistentvolumeclaims")) == 1
