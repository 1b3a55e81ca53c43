"""Values of a configuration that break a run on a cluster, and secrets in plain text."""

import re
from functools import cache

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from samestep.errors import ConfigError
from samestep.hydra import option_keys
from samestep.hydra.compose import check as compose
from samestep.hydra.compose import reject
from samestep.launch import check, main, render
from tests.conftest import run

TOKEN = "hunter2-hunter2"
GITHUB = "ghp_" + "a1" * 18  # in two parts, so that no scanner takes it for a real one
K8S = ["cluster=k8s", "trainer.num_nodes=2", "trainer.devices=2"]
PYXIS = ["cluster=slurm", "cluster.container=pyxis", "cluster.runs=/s/r"]
PARSER = OverridesParser.create()


@cache
def compose_once(*words: str) -> DictConfig:
    return compose(list(words))


def found(*words: str, run_id: str = "mine") -> list[str]:
    """The faults of these words, with what is rendered from them.

    Only files are chosen by Hydra, which is slow; other values are put into what it composed.
    """
    files = [word for word in words if word.startswith(("cluster=", "data="))]
    cfg = compose_once(*files).copy()
    # As a composition does, which may be an earlier one here.
    option_keys.use_keys()
    OmegaConf.set_struct(cfg, False)
    for word in [word for word in words if word not in files]:
        override = PARSER.parse_override(word)
        OmegaConf.update(cfg, override.key_or_group, override.value(), merge=False)
    cfg.run_id = run_id
    return list(check.faults(cfg, render.render(cfg, words) if cfg.cluster.manifest else []))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*K8S, "cluster.gpus=3"], "cluster.gpus=3: each process has one, so it must be"),
        (["cluster=runai", "cluster.gpus=[]", "trainer.accelerator=gpu"],
         "cluster.gpus=[]: trainer.accelerator=gpu needs some"),
        ([*K8S, "cluster.grace_s=90"], "cluster.grace_s=90: must be more than cluster.shutdown_s"),
        ([*K8S, "cluster.image=me/project"], "cluster.image=me/project: can change at any"),
        (["cluster=elastic", "cluster.etcd_image=etcd"], "cluster.etcd_image=etcd: can change"),
        ([*K8S, "cluster.queue_priority=high"],
         "cluster.queue_priority=high: is a class of Kueue and needs cluster.queue"),
        ([*K8S, "data=cifar10", "cluster.volume=null"],
         "cluster.volume=null: data=cifar10 needs data, which the pods do not download; "
         "name a claim that has them, or say cluster.download=true"),
        (["cluster=runai", "cluster.volume=null"],
         "cluster.volume=null: must be the name of a claim"),
        (["cluster=elastic", "cluster.min_nodes=3", "cluster.max_nodes=2"],
         "cluster.min_nodes=3: must be at most cluster.max_nodes=2"),
        (["cluster=elastic", "trainer.num_nodes=2"],
         "trainer.num_nodes=2: stays 1 with cluster=elastic; cluster.max_nodes says how many"),
        (["cluster=swarm", "trainer.devices=2"],
         "trainer.devices=2: stays 1 with cluster=swarm; cluster.devices_per_node says how many"),
        (["cluster=slurm", "cluster.image=ours:1"], "cluster.image=ours:1: is only for a conta"),
        ([*PYXIS, "cluster.image=ours:1"], "cluster.data=null: cluster.container=pyxis needs"),
        ([*PYXIS, "cluster.data=/d", "cluster.image=ours"], "cluster.image=ours: can change"),
        (["cluster=slurm", "cluster.time=4"], "cluster.time=4: must be more than twice"),
    ],
)  # fmt: skip
def test_a_value_that_breaks_a_run(words: list[str], message: str):
    (fault,) = found(*words)
    assert fault.startswith(message)


def test_a_cluster_is_told_the_number_of_devices():
    cfg = compose_once("cluster=k8s", "trainer.devices=auto").copy()
    cfg.run_id = "mine"
    (fault,) = check.faults(cfg, [])
    assert fault.startswith("trainer.devices=auto: a cluster needs a number")


@pytest.mark.parametrize(
    "words",
    [
        [*K8S, "data=cifar10"],
        [*K8S, "data=cifar10", "cluster.volume=null", "cluster.download=true"],
        [*K8S, "cluster.queue_priority=high", "cluster.queue=team-a"],
        ["cluster=swarm", "cluster.devices_per_node=[1,2]", "cluster.shares=[1, 2.5]"],
        ["cluster=elastic", "cluster.max_nodes=4", "cluster.shares=auto"],
        ["cluster=slurm", "cluster.time=0:05:00"], ["cluster=slurm", "cluster.time=0-1"],
        [*PYXIS, "cluster.data=/d", "cluster.image=/s/project.sif"],
        [*K8S, "cluster.env=[{name: GOOGLE_APPLICATION_CREDENTIALS, value: /var/key.json}]"],
    ],
)  # fmt: skip
def test_values_that_break_nothing(words: list[str]):
    assert found(*words) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster=k8s", "trainer.num_nodes=3", "trainer.devices=11"], "each of 33 ranks"),
        (["cluster=swarm", "cluster.devices_per_node=[1,32]"], "each of 33 ranks"),
        (["cluster=elastic", "cluster.max_nodes=33"], "each of 33 ranks"),
    ],
)
def test_a_batch_that_every_container_would_reject(words: list[str], message: str):
    (fault,) = found(*words)
    assert fault.startswith("data.global_batch_size=32: must be at least 33, one sample for ")
    assert message in fault


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster=swarm", "cluster.devices_per_node=[1,2,2]"], "5 ranks on 3 nodes"),
        (["cluster=elastic", "cluster.min_nodes=2", "cluster.max_nodes=4"], "3 ranks on 3 nodes"),
    ],
)
def test_shares_that_some_number_of_ranks_would_reject(words: list[str], message: str):
    (fault,) = found(*words, "cluster.shares=[1, 2.5]")
    assert fault.startswith(f"cluster.shares=[1, 2.5]: the run may have {message}; give one number")


@pytest.mark.parametrize("run_id", ["Mine", "a_b", "a" * 64])
def test_a_name_that_a_cluster_rejects(run_id: str):
    (fault,) = found("cluster=k8s", run_id=run_id)
    assert fault.startswith(f"RUN_ID={run_id}: names things in the cluster")


@pytest.mark.parametrize(
    ("target", "suffix"),  # what controllers append for a run of up to 1000 nodes
    [("k8s", "-999"), ("jobset", "-node-0-999-abcde"), ("kubeflow", "-node-0-999-abcde"),
     ("pytorchjob", "-worker-999"), ("elastic", "-etcd")],
)  # fmt: skip
def test_a_name_is_taken_only_if_all_that_is_made_of_it_fits(target: str, suffix: str):
    longest = "r" * (63 - len(suffix))
    assert found(f"cluster={target}", run_id=longest) == []
    (fault,) = found(f"cluster={target}", run_id=f"{longest}rr")
    assert fault.endswith("choose a RUN_ID that is 2 shorter")


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["cluster=k8s"], "cluster.volume=project must have data"),
        (
            ["cluster=slurm", "cluster.container=pyxis", "cluster.image=x:1", "cluster.runs=/r",
             "cluster.data=/shared"],
            "cluster.data=/shared must have data",
        ),
    ],
)  # fmt: skip
def test_what_the_user_must_put_into_the_volume_is_said(words: list[str], place: str):
    (note,) = check.notes(compose_once(*words, "data=cifar10"))
    assert note.startswith(f"data=cifar10: the pods do not download it; {place}")
    assert list(check.notes(compose_once(*words))) == []  # digits need no files


def test_submitting_needs_an_image_of_the_user():
    (fault,) = check.check_examples(compose_once("cluster=k8s"))
    assert "is only an example; build and push an image" in fault
    assert list(check.check_examples(compose_once("cluster=k8s", "cluster.image=me:1"))) == []


def test_an_image_by_digest_or_by_a_tag_behind_a_port_is_pinned():
    for image in (f"host:5000/project@sha256:{'0' * 64}", "host:5000/project:1.0", "project:1"):
        assert check.PINNED.fullmatch(image)
    for image in ("host:5000/project", "project:latest", "project@sha256:123", "a/b:latest"):
        assert not check.PINNED.fullmatch(image)


@pytest.mark.parametrize(
    "word",
    [
        f"cluster.env=[{{name: WANDB_API_KEY, value: {TOKEN}}}]",
        f"cluster.env=[{{name: HARMLESS, value: {GITHUB}}}]",
        "cluster.env=[{name: URL, value: 'https://me:hunter2@example.com'}]",
        f"run_root={GITHUB}",
    ],
)
def test_a_secret_is_rejected_and_not_repeated(word: str):
    (fault,) = found("cluster=k8s", word)
    assert "is a secret that everyone could read; put it into the Secret" in fault
    assert not re.search("hunter2|ghp_", fault)


def test_a_secret_of_this_machine_is_recognized_by_its_value(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_API_KEY", "Correct-Horse-9")
    (fault,) = found("cluster=k8s", "run_root=runs/Correct-Horse-9")
    assert fault.startswith("run_root: is a secret")


@pytest.mark.parametrize(
    ("document", "places"),
    [
        ({"env": [{"name": f"T_{i}", "value": GITHUB} for i in range(2)]}, ["env[0]", "env[1]"]),
        ({"args": [f"logger.wandb.api_key={TOKEN}"]}, ["args[0]"]),
        ({"environment": [f"WANDB_API_KEY={TOKEN}"]}, ["environment[0]"]),  # of Swarm
        ({"metadata": {"note": GITHUB}}, ["metadata.note"]),
        ({"args": ["cluster.secret=mine"], "secret": "mine"}, []),
    ],
)
def test_a_secret_in_a_file_of_k8s_is_rejected(document: dict, places: list[str]):
    cfg = compose_once("cluster=k8s").copy()
    cfg.run_id = "mine"
    assert [fault.split(": ")[1] for fault in check.faults(cfg, [document])] == places


@pytest.mark.parametrize("cluster", ["k8s", "slurm"])
def test_a_secret_is_not_rendered_either(cluster: str, capsys: pytest.CaptureFixture[str]):
    words = [f"cluster={cluster}", "data.mirror=http://me:hunter2@example.com/x"]
    with pytest.raises(ConfigError, match=r"data.mirror: is a secret that everyone could read"):
        main.main(["--render", *words])
    assert capsys.readouterr().out == ""


def test_a_cluster_says_itself_what_it_fixes_and_appends():
    cfg = compose_once(*K8S).copy()
    cfg.run_id = "a" * 50
    more = {
        "fixed": {"trainer.num_nodes": {"value": 1, "because": "cluster.rooms says how many"}},
        "longest_suffix": 20,
    }
    OmegaConf.update(cfg, "cluster", more, force_add=True)
    assert list(check.faults(cfg, [])) == [
        f"RUN_ID={'a' * 50}: has 50 characters, and the cluster appends up to 20, which makes more "
        "than 63; choose a RUN_ID that is 7 shorter",
        "trainer.num_nodes=2: stays 1 with cluster=k8s; cluster.rooms says how many",
    ]


@pytest.mark.program
def test_each_fault_is_said_once_without_a_traceback():
    with pytest.raises(ConfigError, match=r"^a\nb$"):
        reject(["a", "b", "a"])
    reject([])
    done = run("-m", "samestep", "launch", "cluster=k8s", "cluster.gpus=3", "--check")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: cluster.gpus=3: each process has one, so it must be")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "suffix", "valid"),
    [
        ("digits-cnn-3f2a1b", 0, "digits-cnn-3f2a1b"),
        ("My_Data.v2-cnn-3f2a1b", 0, "my-data-v2-cnn-3f2a1b"),
        ("7-3f2a1b", 0, "run-7-3f2a1b"),
        ("_", 0, "run"),
        ("a" * 70 + "-3f2a1b", 0, "a" * 57 + "3f2a1b"),
        ("a" * 60 + "-3f2a1b", 20, "a" * 37 + "3f2a1b"),
    ],
)
def test_a_name_is_made_valid(name: str, suffix: int, valid: str):
    assert check.make_valid_name(name, suffix) == valid
    assert check.NAME.fullmatch(valid)


def test_a_name_that_was_made_up_is_one_that_clusters_take(monkeypatch: pytest.MonkeyPatch):
    """It has the names of the user's files in configs/."""
    monkeypatch.delenv("RUN_ID", raising=False)
    made_up = "My_Data-resnet_18-3f2a1b"
    monkeypatch.setattr(main.environment, "new_run_id", lambda *words: made_up)
    cfg, manifests = main.prepare(["cluster=k8s"])
    assert cfg.run_id == "my-data-resnet-18-3f2a1b"
    assert {manifest["metadata"]["name"] for manifest in manifests} == {cfg.run_id}
