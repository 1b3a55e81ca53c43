import random
import subprocess
import sys

import pytest
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from samestep.hydra.compose import check
from samestep.launch import render
from tests.conftest import ROOT, environment

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


def test_lists_in_lists_are_spliced():
    env = '[{name: NCCL_DEBUG, value: INFO}, {name: A, value: "1"}]'
    names = [item["name"] for item in container(f"cluster.env={env}")["env"]]
    assert names == ["RUN_ID", "NCCL_DEBUG", "A"]


def test_a_mapping_of_any_keys_is_taken_as_it_is():
    pod = rendered("cluster.node_selector={gpu/product: H100}")["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"gpu/product": "H100"}


def test_the_pods_get_the_overrides_unchanged():
    """Through OmegaConf, YAML and the $(NAME) of Kubernetes, whatever they are made of."""
    generator = random.Random(0)
    pieces = [*"${}()\\\n\t\"':=#- ", "${", "$(", "$$", "\\${", "é", "データ", "seed", "null", "1"]
    cfg = check(OVERRIDES)
    cfg.run_id = "cifar"
    for num_words in (1, 2, 3, 294, 300):
        words = [
            "".join(generator.choices(pieces, k=generator.randint(0, 12))) for _ in range(num_words)
        ]
        documents = yaml.safe_load_all(render.text(render.render(cfg, words)))
        args = list(documents)[-1]["spec"]["template"]["spec"]["containers"][0]["args"]
        assert [in_a_pod(word) for word in args[-num_words:]] == words


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


def test_rendering_needs_no_torch_and_no_network():
    code = (
        "import sys\nfrom samestep.cli import main\n"
        "sys.argv[1:] = ['launch', 'cluster=k8s']\n"
        "try: main()\n"
        "except SystemExit as end: print([end.code, 'torch' in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == "[0, False]"
