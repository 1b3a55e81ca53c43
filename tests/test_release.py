"""What the release workflow demands of a tag, executed."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.program

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("tag", "entry", "exit_code"),
    [
        ("v1.2.3", "1.2.3 (2027-01-31)", 0),
        ("v1.2.4", "1.2.4 (2027-01-31)", 1),  # not the version of the library
        ("v1.2.3", "1.2.3 (unreleased)", 1),
    ],
)
def test_a_tag_is_the_version_and_a_dated_entry(
    tag: str, entry: str, exit_code: int, tmp_path: Path
):
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert workflow[True]["push"]["tags"] == ["v*"]  # YAML takes "on" for true
    (script,) = (
        step["run"]
        for step in workflow["jobs"]["build"]["steps"]
        if step.get("name", "").startswith("The tag must be")
    )
    (tmp_path / "library").mkdir()
    (tmp_path / "library/pyproject.toml").write_text('name = "samestep"\nversion = "1.2.3"\n')
    for name in ("CHANGELOG.md", "library/CHANGELOG.md"):
        (tmp_path / name).write_text(f"# Changelog\n\n## {entry}\n")
    done = subprocess.run(
        ["bash", "-e", "-c", script], cwd=tmp_path, env=os.environ | {"GITHUB_REF_NAME": tag}
    )
    assert done.returncode == exit_code
