"""A run touches only what it has made. Real servers: tests/labs/servers/test_ownership.py.

Clusters without Kubernetes: test_slurm.py, test_commands.py.
"""

from pathlib import Path

import pytest

from samestep.errors import RunError
from samestep.launch import kubectl
from tests import launching
from tests.samestep.launch.fake_kubectl import SINCE, FakeKubectl, failing

WORDS = ["cluster.image=ghcr.io/me/project:1.2.3", "trainer.num_nodes=2", "cluster.volume=null"]
ELASTIC = [word for word in WORDS if "num_nodes" not in word]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeKubectl:
    fake = FakeKubectl()
    monkeypatch.setattr(kubectl, "call", fake)
    return fake


def samestep(command: str, *words: str, cwd: Path):
    variables = {"RUN_ID": "web"} if command == "launch" else {}
    return launching.samestep(command, *words, cwd=cwd, **variables)


@pytest.mark.parametrize(
    ("target", "kind", "name"),
    [
        ("k8s", "Service", "web"),
        ("k8s", "NetworkPolicy", "web"),
        ("jobset", "JobSet", "web"),
        ("kubeflow", "TrainJob", "web"),
        ("pytorchjob", "PyTorchJob", "web"),
        ("elastic", "Service", "web-etcd"),
    ],
)
def test_the_object_of_a_stranger_stays(cluster, tmp_path, target, kind, name):
    cluster.put(kind, name, **{"app.kubernetes.io/instance": "web"})
    words = ELASTIC if target == "elastic" else WORDS
    for command, first in (("cancel", ["web"]), ("launch", []), ("launch", ["--check"])):
        done = samestep(command, *first, f"cluster={target}", *words, cwd=tmp_path)
        assert done.returncode == 2, done.stdout
        assert f"the cluster has another {kind} {name}, since {SINCE}" in done.stderr
        assert done.stderr.count("\n") == 1
    status = samestep("status", "web", f"cluster={target}", *words, cwd=tmp_path)
    assert "there is no such run" in status.stderr
    assert cluster.done == []


def test_a_name_is_one_run_on_all_targets(cluster, tmp_path):
    assert samestep("launch", "cluster=k8s", *WORDS, cwd=tmp_path).returncode == 0
    before = dict(cluster.objects)
    done = samestep("launch", "cluster=jobset", *WORDS, cwd=tmp_path)
    assert done.returncode == 2
    assert "web: is a run with cluster=k8s, launched by " in done.stderr
    assert f"since {SINCE}" in done.stderr
    assert cluster.objects == before


def test_the_run_of_another_project_is_named(cluster, tmp_path):
    identity = {"samestep/run": "web", "samestep/project": "other", "samestep/target": "k8s"}
    cluster.put("NetworkPolicy", "web", **identity)
    done = samestep("launch", "cluster=k8s", *WORDS, cwd=tmp_path)
    assert done.returncode == 2
    assert "NetworkPolicy web belongs to the run web of the project other" in done.stderr
    assert cluster.done == []


def test_a_run_that_does_not_exist_cannot_be_cancelled(cluster, tmp_path):
    done = samestep("cancel", "web", "cluster=k8s", *WORDS, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "web: there is no such run" in done.stderr
    assert done.stderr.count("\n") == 1


def test_cancel_removes_what_is_left_of_a_run(cluster, tmp_path):
    assert samestep("launch", "cluster=k8s", *WORDS, cwd=tmp_path).returncode == 0
    del cluster.objects["Job", "web"]
    done = samestep("cancel", "web", cwd=tmp_path)
    assert done.stdout == "web: had ended; its objects are removed\n"
    assert cluster.objects == {}


@pytest.mark.parametrize("target", ["k8s", "jobset", "pytorchjob", "kubeflow", "elastic"])
def test_the_owner_comes_first_and_owns_the_others(cluster, tmp_path, monkeypatch, target):
    monkeypatch.setattr("samestep.launch.kubeflow.is_installed", lambda: False)
    words = ELASTIC if target == "elastic" else WORDS
    done = samestep("launch", f"cluster={target}", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    created = [names for verb, names in cluster.done if verb == "created"]
    # Trainer rejects a TrainJob without its runtime.
    first = "TrainingRuntime/web" if target == "kubeflow" else None
    assert created[0] == [first] if first else len(created[0]) == 1
    owner = created[1 if first else 0][0].partition("/")[0]
    for (kind, _), item in cluster.objects.items():
        owners = item["metadata"].get("ownerReferences", [])
        assert [reference["kind"] for reference in owners] == ([] if kind == owner else [owner])
    assert samestep("cancel", "web", cwd=tmp_path).returncode == 0
    assert cluster.objects == {}


def test_what_the_cluster_rejects_is_said_before_anything_exists(cluster, tmp_path):
    cluster.before = failing("dry-run", "NetworkPolicy", "me may not create networkpolicies here")
    for flags in ([], ["--check"]):
        done = samestep("launch", *flags, "cluster=k8s", *WORDS, cwd=tmp_path)
        assert done.returncode == 2
        assert "me may not create networkpolicies here" in done.stderr
    assert cluster.done == []
    assert not (tmp_path / "runs").exists()


def test_a_queue_without_kueue_is_said_before_anything_exists(cluster, tmp_path, monkeypatch):
    def call(cfg, *arguments, **options):
        if "localqueues.kueue.x-k8s.io" in arguments:
            raise kubectl.build_error(
                'error: the server doesn\'t have a resource type "localqueues"'
            )
        return cluster(cfg, *arguments, **options)

    monkeypatch.setattr(kubectl, "call", call)
    for flags in ([], ["--check"]):
        words = [*flags, "cluster=k8s", *WORDS, "cluster.queue=team"]
        done = samestep("launch", *words, cwd=tmp_path)
        assert done.returncode == 2
        assert "cluster.queue=team: the cluster does not know localqueues" in done.stderr
    assert cluster.done == []


def test_what_was_made_is_taken_back(cluster, tmp_path):
    """But for the claim, which another run may use by now."""
    cluster.before = failing("create", "NetworkPolicy", "the cluster does not answer")
    volume = ["cluster.volume=team", "cluster.volume_size=1Gi"]
    done = samestep("launch", "cluster=k8s", *WORDS, *volume, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "error: the cluster does not answer\n"
    assert cluster.done[-1] == ("deleted", ["Job/web"])
    assert list(cluster.objects) == [("PersistentVolumeClaim", "team")]


def test_what_cannot_be_taken_back_is_named_and_found(cluster, tmp_path):
    def before(verb, manifests):
        is_lost = ("Job", "web") in cluster.objects and verb != "get"
        if is_lost:
            raise RunError("the cluster does not answer")

    cluster.before = before
    done = samestep("launch", "cluster=k8s", *WORDS, cwd=tmp_path)
    assert done.returncode == 1
    assert "web: may have left Job web" in done.stderr.replace(
        "NetworkPolicy web, Service web, ", ""
    )
    assert "samestep cancel web does it" in done.stderr
    assert "web" in samestep("status", "web", cwd=tmp_path).stdout
    cluster.before = lambda verb, manifests: None
    assert samestep("cancel", "web", cwd=tmp_path).returncode == 0
    assert cluster.objects == {}


def launch_beside(cluster: FakeKubectl, tmp_path: Path, *words: str, verb_after: str = "create"):
    """Launch a run; another launch, with these words, is faster.

    It creates its objects just before the first call with this verb.
    """
    (tmp_path / "faster").mkdir()
    faster = []

    def before(verb, manifests):
        if verb == verb_after and not faster:
            faster.append(None)
            done = samestep("launch", *WORDS, *words, cwd=tmp_path / "faster")
            assert done.returncode == 0, done.stderr

    cluster.before = before
    return samestep("launch", "cluster=k8s", *WORDS, cwd=tmp_path)


@pytest.mark.parametrize("verb", ["create", "dry-run"])
def test_the_slower_of_two_launches_is_told_whose_run_it_is(cluster, tmp_path, verb):
    done = launch_beside(cluster, tmp_path, "cluster=k8s", "seed=7", verb_after=verb)
    assert done.returncode == 1
    assert "web: was launched at the same time by " in done.stderr
    assert f"since {SINCE}, and that run stays" in done.stderr
    (container,) = cluster.objects["Job", "web"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][-1] == "seed=7"
    assert len(cluster.objects) == 3


def test_of_two_launches_on_two_targets_the_slower_takes_its_own_back(cluster, tmp_path):
    done = launch_beside(cluster, tmp_path, "cluster=jobset")
    assert done.returncode == 2
    assert "web: is a run with cluster=jobset" in done.stderr
    assert set(cluster.objects) == {("JobSet", "web"), ("NetworkPolicy", "web")}


def test_a_run_that_runs_gets_what_it_lacks(cluster, tmp_path):
    for _ in range(2):
        done = samestep("launch", "cluster=k8s", *WORDS, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert len(cluster.objects) == 3
        del cluster.objects["Service", "web"]
    assert "web: was launched by " in done.stdout
    assert "stays unchanged" in done.stdout


def test_the_remains_of_a_run_go_before_a_new_one(cluster, tmp_path):
    """The cluster is about to remove them, because their owner is gone."""
    assert samestep("launch", "cluster=k8s", *WORDS, cwd=tmp_path).returncode == 0
    del cluster.objects["Job", "web"]
    for item in cluster.objects.values():
        item["metadata"]["ownerReferences"][0]["uid"] = "of the one that is gone"
    assert samestep("launch", "cluster=k8s", *WORDS, cwd=tmp_path).returncode == 0
    owner = cluster.objects["Job", "web"]["metadata"]["uid"]
    for kind in ("Service", "NetworkPolicy"):
        (reference,) = cluster.objects[kind, "web"]["metadata"]["ownerReferences"]
        assert reference["uid"] == owner
