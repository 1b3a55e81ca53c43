"""Secrets are refused wherever they stand, and never repeated."""

import re

import pytest

from samestep.errors import ConfigError
from samestep.launch import check, render
from samestep.launch.main import launch
from tests.samestep.launch.check.planting import CONTAINER, compose_once, composed, found

TOKEN = "hunter2-hunter2"
GITHUB = "ghp_" + "a1" * 18  # in two parts, so that no scanner takes it for a real one
LEAKS = [
    [f"cluster.env=[{{name: WANDB_API_KEY, value: {TOKEN}}}]"],
    [f"cluster.env=[{{name: AWS_SECRET_ACCESS_KEY, value: {TOKEN}}}]"],
    [f"cluster.env=[{{name: DB_PASSWORD, value: {TOKEN}}}]"],
    [f"cluster.env=[{{name: HF_TOKEN, value: {TOKEN}}}]"],
    [f"cluster.env=[{{name: HARMLESS, value: {GITHUB}}}]"],
    ["cluster.env=[{name: URL, value: 'https://me:hunter2@example.com'}]"],
    [f"run_root={GITHUB}"],
]


@pytest.mark.parametrize("overrides", LEAKS)
def test_a_secret_is_refused_and_not_repeated(overrides):
    faults = "\n".join(found("k8s", *overrides))
    assert "is a secret that everyone could read; put it into the Secret" in faults
    assert not re.search("hunter2|ghp_", faults)


@pytest.mark.parametrize("cluster", ["k8s", "kubeflow", "runai", "swarm", "docker", "flyte"])
def test_a_secret_is_not_rendered_either(cluster: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match=r"data.mirror: is a secret that everyone could read"):
        launch("render", [f"cluster={cluster}", "data.mirror=http://me:hunter2@example.com/x"])
    assert capsys.readouterr().out == ""


def test_a_secret_of_this_machine_is_recognised_by_its_value(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "Correct-Horse-9")
    (fault,) = found("k8s", "run_root=runs/Correct-Horse-9")
    assert fault.startswith("run_root: is a secret")
    assert "Correct-Horse" not in fault


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Job", f"{CONTAINER}.env[1]", {"name": "API_TOKEN", "value": TOKEN}),
        ("Job", f"{CONTAINER}.args[6]", f"logger.wandb.api_key={TOKEN}"),
        ("Job", f"{CONTAINER}.args[6]", f"--token={TOKEN}"),
        ("Job", "metadata.annotations", {"note": GITHUB}),
    ],
)
def test_a_secret_in_a_manifest_is_refused(kind, path, value):
    faults = "".join(found(**{f"{kind}:{path}": value}))
    assert "is a secret" in faults
    assert not re.search("hunter2|ghp_", faults)


def test_a_secret_is_not_made_from_a_manifest():
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "x"},
        "data": {"A": "eA=="},
    }
    cfg, documents = composed()
    assert "made once, by kubectl create secret" in "".join(check.faults(cfg, [*documents, secret]))


@pytest.mark.parametrize(
    "override",
    [
        "cluster.env=[{name: TOKENIZERS_PARALLELISM, value: 'false'}]",
        "cluster.env=[{name: GOOGLE_APPLICATION_CREDENTIALS, value: /var/key.json}]",
        "cluster.env=[{name: MONKEY, value: banana}]",
        "cluster.secret=my-secret",
        "cluster.tolerations=[{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]",
        "cluster.node_selector={cloud.google.com/gke-accelerator: nvidia-h100}",
    ],
)
def test_what_only_looks_like_a_secret_is_let_through(override):
    assert found("k8s", override) == []


def test_secrets_in_a_stack_of_swarm():
    cfg = compose_once("cluster=swarm").copy()
    cfg.run_id = "mine"
    documents = render.render(cfg, [])
    assert list(check.faults(cfg, documents)) == []
    node = next(iter(documents[0]["services"].values()))
    node["environment"] = [*node["environment"], f"WANDB_API_KEY={TOKEN}"]
    (fault,) = check.faults(cfg, documents)
    assert re.fullmatch(r"services\.[\w-]+\.environment\[\d+\]: is a secret .*", fault)


def test_a_secret_is_reported_once_at_the_variable_that_holds_it():
    cfg, documents = composed()
    env = documents[-1]["spec"]["template"]["spec"]["containers"][0]["env"]
    env += [{"name": f"TOKEN_{number}", "value": GITHUB} for number in range(12)]
    places = [fault.split(": ")[1] for fault in check.faults(cfg, documents)]
    assert places == [f"{CONTAINER}.env[{number}]" for number in range(1, 13)]
