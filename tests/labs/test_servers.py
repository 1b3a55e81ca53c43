"""The workflow that builds the real servers. What the servers do: tests/labs/servers."""

from typing import Any

import yaml

from tests.conftest import ROOT

Step = dict[str, Any]


def read_steps() -> list[Step]:
    workflow = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())
    return workflow["jobs"]["servers"]["steps"]


def find_keys(steps: list[Step]) -> set[str]:
    """The names under which the workflow looks for the servers in the cache."""
    found = {step["with"]["key"] for step in steps if "samestep-servers" in str(step)}
    return found - {"${{ steps.cache.outputs.cache-primary-key }}"}


def test_the_servers_are_kept_for_the_pinned_versions():
    (key,) = find_keys(read_steps())
    # What build.sh itself compares with what it has built.
    for place in ("labs/servers/build.sh", "labs/servers/control_plane/*"):
        assert place in key


def test_the_servers_are_kept_before_a_test_can_fail():
    words = [str(step) for step in read_steps()]
    places = [
        next(number for number, step in enumerate(words) if part in step)
        for part in ("cache/restore@", "build.sh", "cache/save@", "make test")
    ]
    assert places == sorted(places)
    assert "SKIPPED" in words[-1]
