"""What each target becomes: golden files, and what all of them promise.

GOLDEN=write python -m pytest -n 0 tests/samestep/launch/test_targets.py

writes ``tests/golden`` anew; look at what git says has changed.
"""

import os
import random
import shlex

import pytest
import yaml

from samestep.hydra.compose import check
from samestep.launch import render
from tests.conftest import ROOT, run
from tests.samestep.launch.test_render import in_a_pod

GOLDEN = ROOT / "tests/golden"
UNEQUAL = "cluster.devices_per_node=[1,2]"
TWO_BY_TWO = ["trainer.num_nodes=2", "trainer.devices=2"]
ELASTICJOB = "cluster.manifest=[network,etcd,elasticjob]"
KUBERNETES = ("k8s", "jobset", "pytorchjob", "kubeflow", "elastic", "elasticjob")
TARGETS = {  # its name, also of its golden file: the words that make it
    "k8s": ["cluster=k8s", *TWO_BY_TWO],
    "k8s-cpu": ["cluster=k8s", *TWO_BY_TWO, "trainer.accelerator=cpu"],
    "jobset": ["cluster=jobset", *TWO_BY_TWO],
    "pytorchjob": ["cluster=pytorchjob", *TWO_BY_TWO],
    "kubeflow": ["cluster=kubeflow", *TWO_BY_TWO],
    "kubeflow-cpu": ["cluster=kubeflow", *TWO_BY_TWO, "trainer.accelerator=cpu"],
    "elastic": ["cluster=elastic", "trainer.devices=2", "cluster.max_nodes=4"],
    "elasticjob": ["cluster=elastic", ELASTICJOB, "trainer.devices=2"],
    "runai": ["cluster=runai", *TWO_BY_TWO],
    "runai-cpu": ["cluster=runai", *TWO_BY_TWO, "trainer.accelerator=cpu"],
    "runai-v1": ["cluster=runai", "cluster.cli=v1", *TWO_BY_TWO],
    "slurm": ["cluster=slurm", *TWO_BY_TWO],
    "swarm": ["cluster=swarm", UNEQUAL, "cluster.secrets=[netrc]", "data=cifar10"],
    "swarm_docker": ["cluster=swarm", "cluster.manifest=docker", UNEQUAL, "data=cifar10"],
    "flyte": ["cluster=flyte", "trainer.devices=2", "data=cifar10"],
}
JUDGED = ("k8s", "k8s-cpu", "jobset", "pytorchjob", "kubeflow", "kubeflow-cpu", "elastic")
"""Targets without a golden file: real servers judge them, in tests/labs/servers.

Their pods are that of ElasticJob, which has one: see ``test_every_target_has_the_same_pod``.
"""
RUNAI = [name for name in TARGETS if name.startswith("runai")]
MANIFESTS = [name for name in TARGETS if name.partition("-")[0] in KUBERNETES]
KINDS = {
    "k8s": "Job", "jobset": "JobSet", "pytorchjob": "PyTorchJob", "kubeflow": "TrainingRuntime",
    "elastic": "Job", "elasticjob": "ElasticJob",
}  # fmt: skip


def configured(words, run_id="cifar"):
    cfg = check(words)
    cfg.run_id = run_id
    return cfg


def rendered(name, *more):
    words = [*TARGETS[name], *more]
    return render.render(configured(words), words)


def document(name, *more, kind=None):
    return document_of(rendered(name, *more), name, kind)


def document_of(documents, name, kind=None):
    kind = kind or KINDS[name.removesuffix("-cpu")]
    return next(item for item in documents if item["kind"] == kind)


def pod(name, *more):
    """The pod that trains, wherever a target has it."""
    return pod_of(rendered(name, *more), name)


def pod_of(documents, name):
    node, todo = None, [document_of(documents, name)]
    while todo:
        node = todo.pop()
        if isinstance(node, dict) and "containers" in node.get("spec", {}):
            return node
        todo += list(node.values() if isinstance(node, dict) else node) if node else []
        todo = [item for item in todo if isinstance(item, (dict, list))]
    raise AssertionError(name)


def command(name, *more, action="submit"):
    words = [*TARGETS[name], *more]
    return render.command(configured(words), words, action)


@pytest.mark.parametrize("name", [name for name in TARGETS if name not in JUDGED])
def test_a_target_becomes_what_its_golden_file_says(name):
    is_command = check(TARGETS[name]).cluster.manifest is None
    is_yaml = name in (*MANIFESTS, "swarm", "swarm_docker")
    path = GOLDEN / (f"{name}.yaml" if is_yaml else f"{name}.sh")
    text = f"{shlex.join(command(name))}\n" if is_command else render.text(rendered(name))
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text(), "GOLDEN=write rewrites it"


@pytest.mark.parametrize("name", [name for name in MANIFESTS if name != "k8s"])
def test_every_target_has_the_same_pod(name):
    """Less the container's name, the target's, and what tells it of the other nodes."""
    cpu = ["trainer.accelerator=cpu"] if name.endswith("-cpu") else []
    ours, theirs = pod(name), pod("k8s", *cpu)
    for one in (ours, theirs):
        del one["metadata"]["labels"]["samestep/target"]
        (container,) = one["spec"]["containers"]
        for key in ("name", "args"):
            container.pop(key)
        container["env"] = [v for v in container["env"] if v["name"] != "PET_NODE_RANK"]
        container["resources"]["limits"].pop("cpu", None)
        for key in ("subdomain", "restartPolicy"):
            one["spec"].pop(key, None)
    assert ours == theirs


@pytest.mark.parametrize("name", KUBERNETES)
def test_the_pods_of_every_target_get_the_overrides_unchanged(name):
    generator = random.Random(name)
    pieces = [*"${}()\\\n\t\"':=#- ", "${seed}", "$(RUN_ID)", "$$", "\\${", "é", "データ", "null"]
    cfg = configured(TARGETS[name])
    for num_words in (1, 80):
        words = [
            "".join(generator.choices(pieces, k=generator.randint(0, 12))) for _ in range(num_words)
        ]
        documents = yaml.safe_load_all(render.text(render.render(cfg, words)))
        found = [args for item in documents for args in arguments(item)]
        assert found
        for args in found:
            assert [in_a_pod(word) for word in args[-num_words:]] == words


def arguments(node):
    """All ``args`` within ``node``, but etcd's."""
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    own = [node["args"]] if isinstance(node, dict) and "args" in node else []
    own = [args for args in own if "--enable-v2" not in args]
    return own + [args for child in children for args in arguments(child)]


@pytest.mark.parametrize("name", KUBERNETES)
def test_everything_of_a_run_has_its_name_and_label(name):
    """By the label the launcher finds it, and by its name no other run touches it."""
    words = ["cluster.namespace=ml", "cluster.priority_class=urgent"]
    if name != "elasticjob":  # runs wait in a queue in tests/labs/servers/test_queue.py
        words += ["cluster.queue=team-a", "cluster.queue_priority=high"]
    documents = rendered(name, *words)
    identity = {"samestep/run": "cifar", "samestep/project": "project"}
    identity["samestep/target"] = name.removesuffix("job") if name == "elasticjob" else name
    for item in documents:
        assert identity.items() <= item["metadata"]["labels"].items()
        assert item["metadata"]["name"].startswith("cifar")
        assert item["metadata"]["namespace"] == "ml"
        assert item["metadata"]["labels"]["app.kubernetes.io/instance"] == "cifar"
    trains = pod_of(documents, name)
    assert identity.items() <= trains["metadata"]["labels"].items()
    assert trains["metadata"]["labels"]["app.kubernetes.io/instance"] == "cifar"
    assert trains["spec"]["priorityClassName"] == "urgent"
    by_kind = {item["kind"]: item for item in documents}
    policy = by_kind["NetworkPolicy"]["spec"]
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"podSelector": policy["podSelector"]}]
    assert policy["podSelector"]["matchLabels"] == identity
    if name == "elastic":  # a run without its etcd is lost
        etcd = by_kind["Deployment"]["spec"]["template"]["spec"]
        assert etcd["priorityClassName"] == "urgent"
    if name != "elasticjob":
        run = by_kind["TrainJob" if name == "kubeflow" else KINDS[name]]
        labels = run["metadata"]["labels"]
        assert labels["kueue.x-k8s.io/queue-name"] == "team-a"
        assert labels["kueue.x-k8s.io/priority-class"] == "high"


@pytest.mark.parametrize("name", RUNAI)
def test_there_are_as_many_workers_as_nodes_beside_the_master(name):
    """Of the targets on Kubernetes, tests/labs/servers counts the pods."""
    assert "--workers=4" in command(name, "trainer.num_nodes=5")


@pytest.mark.program
def test_rendering_needs_neither_torch_nor_an_sdk():
    code = (
        "import sys\nfrom samestep.cli import main\n"
        "for words in sys.argv[1:]:\n"
        "    sys.argv[1:] = ['launch', '--render', *words.split()]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "print([name for name in ('torch', 'kubernetes', 'kubeflow') if name in sys.modules])"
    )
    names = ("kubeflow", "slurm")  # each with parts of its own
    result = run("-c", code, *(" ".join(TARGETS[name]) for name in names))
    assert result.stdout.splitlines()[-1:] == ["[]"], result.stderr


def test_elastic_pods_are_as_many_as_may_come_and_any_of_them_ends_the_run():
    job = document("elastic", "cluster.min_nodes=2")
    assert job["spec"]["parallelism"] == 4
    assert "completions" not in job["spec"]  # else a Job waits for each
    assert "--nnodes=2:4" in pod("elastic", "cluster.min_nodes=2")["spec"]["containers"][0]["args"]
    spec = document("elasticjob", "cluster.max_nodes=3")["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 3)
    assert spec["replicaSpecs"]["Worker"]["replicas"] == 3
