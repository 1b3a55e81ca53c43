"""Whether quotas suffice for all pods. Real servers: tests/labs/servers/test_ownership.py."""

import json

import pytest

from samestep.hydra.compose import check
from samestep.launch import kubectl, quotas, render, volume

WORDS = ["cluster.image=ghcr.io/me/project:1.2.3", "cluster.volume=team"]


def find(*words):
    words = [*words, *WORDS]
    cfg = check(words)
    cfg.run_id = "mine"
    return quotas.find_templates(cfg, render.render(cfg, words))


@pytest.mark.parametrize("target", ["k8s", "jobset", "kubeflow", "pytorchjob"])
def test_each_node_is_a_pod(target):
    assert len(find(f"cluster={target}", "trainer.num_nodes=3")) == 3


def test_an_elastic_run_needs_its_minimum_and_etcd():
    names = [
        template["spec"]["containers"][0]["name"]
        for template in find("cluster=elastic", "cluster.min_nodes=2", "cluster.max_nodes=9")
    ]
    assert sorted(names) == ["elasticjob-worker", "elasticjob-worker", "etcd"]


def test_data_come_in_a_single_pod():
    cfg = check(["cluster=k8s", "trainer.num_nodes=3", "cluster.volume_size=1Gi", *WORDS])
    cfg.run_id = "data"
    assert len(quotas.find_templates(cfg, volume.render_job(cfg, []))) == 1


def test_the_merged_pod_asks_for_all_and_says_nothing_twice():
    (template, *_) = templates = find("cluster=k8s", "trainer.num_nodes=3")
    merged = quotas.merge_pods(templates)
    containers = merged["spec"]["containers"]
    assert len({container["name"] for container in containers}) == 3
    (container,) = template["spec"]["containers"]
    for found in containers:
        assert found["resources"] == container["resources"]
        assert found["securityContext"] == container["securityContext"]
        assert "ports" not in found
    assert merged["metadata"] == template["metadata"]


@pytest.mark.parametrize(
    ("used", "scopes", "is_rejected"),
    [("1", {}, False), ("2", {}, True), ("2", {"scopes": ["BestEffort"]}, False)],
)
def test_a_quota_without_scopes_counts_the_pods(monkeypatch, used, scopes, is_rejected):
    status = {"hard": {"count/pods": "4"}, "used": {"count/pods": used}}
    quota = {"metadata": {"name": "small"}, "spec": {"hard": {}} | scopes, "status": status}
    monkeypatch.setattr(kubectl, "call", lambda *_, **__: json.dumps({"items": [quota]}))
    cfg = check(["cluster=k8s"])
    cfg.run_id = "mine"
    if not is_rejected:
        quotas.reject_too_many(cfg, 3)
        return
    with pytest.raises(kubectl.QuotaError, match=r"mine: 3 pods together: .* small is used up"):
        quotas.reject_too_many(cfg, 3)
