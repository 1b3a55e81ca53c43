import re
import shutil

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from samestep.errors import ConfigError
from samestep.hydra.compose import check
from samestep.launch import render
from samestep.launch.main import compose_for_pods
from samestep.run_spec import leaves
from tests.conftest import ROOT

OVERRIDES = ["cluster=k8s", "trainer.num_nodes=2", "trainer.devices=2"]


def rendered(*overrides, kind="Job", run_id="cifar"):
    words = [*OVERRIDES, *overrides]
    cfg = check(words)
    cfg.run_id = run_id
    return next(document for document in render.render(cfg, words) if document["kind"] == kind)


def container(*overrides):
    return rendered(*overrides)["spec"]["template"]["spec"]["containers"][0]


def test_values_come_from_the_configuration():
    job = rendered("cluster.cpus=3", "cluster.namespace=ml", "cluster.queue=team-a")
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (2, 2)
    assert job["metadata"]["name"] == "cifar"
    assert job["metadata"]["namespace"] == "ml"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert container("cluster.cpus=3")["resources"]["requests"]["cpu"] == 3


def test_what_has_no_value_is_left_out():
    job = rendered()
    assert "namespace" not in job["metadata"]
    assert "kueue.x-k8s.io/queue-name" not in job["metadata"]["labels"]
    assert {"name": "tmp", "emptyDir": {}} in job["spec"]["template"]["spec"]["volumes"]
    without = rendered("cluster.volume=null", "cluster.user=null")
    pod = without["spec"]["template"]["spec"]
    assert {"name": "project"} in pod["volumes"]
    assert "runAsUser" not in pod["securityContext"]


def test_there_is_a_gpu_for_each_process_unless_it_is_told_to_do_without():
    assert container()["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert "nvidia.com/gpu" not in container("trainer.accelerator=cpu")["resources"]["limits"]
    assert "--nproc-per-node=2" in container("trainer.accelerator=cpu")["args"]


def in_a_pod(word):
    """What the kubelet makes of an argument; a variable that is not set stays.

    Source: k8s.io/kubernetes/third_party/forked/golang/expansion: $$ is $.
    """
    result, place = "", 0
    while place < len(word):
        if word.startswith("$$", place):
            result, place = result + "$", place + 2
        else:
            result, place = result + word[place], place + 1
    return result


def test_a_value_without_a_home_is_an_error():
    with pytest.raises(OmegaConfBaseException, match="nowhere"):
        render.fill([{"a": "${nowhere}"}], OmegaConf.create({"run_id": "x"}))


CLUSTERS = ["slurm", "swarm", "runai", "kubeflow", "elastic"]
NOT_A_LINE = ("gpu\ntouch made", "12:00:00\n", "a\rb", "a\x1b[2Jb", "a\u2028b")


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_no_text_of_a_cluster_is_more_than_one_line(cluster):
    """In a batch script a shell would execute what comes after the newline."""
    cfg = check([f"cluster={cluster}"])
    for key, value in leaves(OmegaConf.to_container(cfg)).items():
        group = key.split(".")[0]
        if group not in ("cluster", "run_root", "run_dir") or not isinstance(value, str | None):
            continue
        if key.startswith("cluster.fixed."):  # whose names have dots; nothing is rendered from it
            continue
        for text in NOT_A_LINE if cluster == "slurm" else NOT_A_LINE[:1]:
            evil = cfg.copy()
            OmegaConf.update(evil, key, text)
            lines = [*render.find_unprintable(evil)]
            assert any(line.startswith(f"{key}=") for line in lines), key
            assert all(line.isprintable() for line in lines)


def test_a_block_of_yaml_is_refused_where_a_line_is_needed():
    def fault(*words: str) -> str:
        with pytest.raises(ConfigError) as error:
            compose_for_pods(words)
        return str(error.value)

    message = fault("cluster=slurm", "cluster.time='12:00:00\n'")
    assert message == (
        'cluster.time="12:00:00\\n": must be one line without control characters; in a YAML file '
        "write it beside its key, without | or >"
    )
    assert "cluster.options[0]=" in fault("cluster=slurm", "cluster.options=['--qos=a\nrm x']")
    assert "run_root=" in fault("run_root='a\nb'")
    assert "a string" in fault("cluster=slurm", "cluster.partition={a: b}")


@pytest.mark.parametrize("word", ["y", "N", "1e-3", ".5", "0o14", "1_000"])
def test_a_text_that_kubectl_would_read_as_something_else_has_quotes(word):
    """Found by a real API server: a variable with the value y was true for it."""
    assert f"'{word}'" in render.text([{"value": word}])


@pytest.mark.parametrize("word", ["2Gi", "--nnodes=2", "1.2.3"])
def test_other_texts_have_no_quotes(word):
    assert render.text([{"value": word}]) == f"value: {word}\n"


@pytest.mark.parametrize("target", ["swarm", "slurm", "runai", "flyte"])
def test_a_copy_without_kubernetes_labels_its_runs(tmp_path, monkeypatch, target):
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    (tmp_path / "k8s/pod.yaml").unlink()
    monkeypatch.setattr(render, "project_folder", lambda: tmp_path)
    cfg = check([f"cluster={target}"])
    cfg.run_id = "web"
    if cfg.cluster.manifest:
        text = render.text(render.render(cfg, []))
    else:
        text = " ".join(render.command(cfg, [], "submit"))
    for label in (r"run\W+web", r"project\W+project", rf"target\W+{target}"):
        assert re.search(rf"samestep/{label}\b", text)


def test_an_older_copy_has_the_labels_in_the_file_of_the_pod(tmp_path, monkeypatch):
    (tmp_path / "k8s").mkdir()
    (tmp_path / "k8s/pod.yaml").write_text("identity: {samestep/run: '${run_id}'}\n")
    monkeypatch.setattr(render, "project_folder", lambda: tmp_path)
    cfg = check(["cluster=k8s"])
    cfg.run_id = "web"
    assert render.find_values(cfg, []).pod.identity == {"samestep/run": "web"}
