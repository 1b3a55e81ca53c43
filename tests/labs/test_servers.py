"""The workflows that build the real servers. What the servers do: tests/labs/servers."""

from typing import Any

import yaml

from tests.conftest import ROOT

Step = dict[str, Any]


def read_steps(name: str) -> list[Step]:
    """All steps of a workflow."""
    workflow = yaml.safe_load((ROOT / ".github/workflows" / name).read_text())
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def find_keys(steps: list[Step]) -> set[str]:
    """The names under which a workflow looks for the servers in the cache."""
    found = {step["with"]["key"] for step in steps if "samestep-servers" in str(step)}
    return found - {"${{ steps.cache.outputs.cache-primary-key }}"}


def test_the_night_and_each_change_share_the_servers_of_the_pinned_versions():
    keys = find_keys(read_steps("servers.yml"))
    assert keys == find_keys(read_steps("ci.yml"))
    (key,) = keys
    # What build.sh itself compares with what it has built.
    for place in ("labs/servers/build.sh", "labs/servers/control_plane/*"):
        assert place in key


def test_the_servers_are_kept_before_a_test_can_fail():
    words = [str(step) for step in read_steps("servers.yml")]
    places = [
        next(number for number, step in enumerate(words) if part in step)
        for part in ("cache/restore@", "build.sh", "cache/save@", "make test")
    ]
    assert places == sorted(places)
    assert "skipped" in words[-1]
