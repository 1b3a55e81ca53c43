"""The fixture ``cluster``. The report of a failed test ends with the objects of its run."""

import json
import os
from collections.abc import Iterator

import pytest

from labs.e2e.cluster import Cluster, kubectl, own_namespace


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster, with a namespace for this session, or with ``NAMESPACE`` and ``VOLUME``."""
    image, claim = os.environ.get("IMAGE"), os.environ.get("VOLUME")
    assert image, "E2E=1 needs IMAGE=<name:tag>, an image of this repository that the nodes have"
    pull = os.environ.get("IMAGE_PULL_POLICY", "Never")
    version = json.loads(kubectl("version", "--output=json"))["serverVersion"]
    assert int(version["minor"].rstrip("+")) >= 29, f"{version['gitVersion']}: needs 1.29 or later"
    if claim:
        namespace = os.environ.get("NAMESPACE")
        assert namespace, f"VOLUME={claim} needs NAMESPACE=<the namespace of that claim>"
        yield Cluster(image, pull, namespace, claim)
        return
    with own_namespace(image, pull) as cluster:
        yield cluster


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    cluster, run_id = (item.funcargs.get(name) for name in ("cluster", "run_id"))
    if report.failed and cluster and run_id and report.when == "call":
        report.sections.append((f"{run_id} in the cluster", cluster.state(run_id)))
    return report
