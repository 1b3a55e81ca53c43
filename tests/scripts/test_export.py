"""Exported files, read as the documentation says."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conftest import ROOT, run


@pytest.fixture
def run_dir(digits_run: Path, tmp_path: Path) -> Path:
    """A copy of the shared run, to write into."""
    return shutil.copytree(digits_run, tmp_path / "digits")


def test_each_file_is_read_as_the_documentation_says(run_dir: Path) -> None:
    result = run("scripts/export.py", str(run_dir))
    assert (result.returncode, result.stderr) == (0, "")
    files = sorted(path.name for path in (run_dir / "export").iterdir())
    assert files == ["README.md", "config.yaml", "model.pt2", "model.safetensors"]
    differences = dict(line.split() for line in result.stdout.splitlines()[1:])
    assert list(differences) == ["model.safetensors", "model.pt2"]
    assert all(float(difference) < 1e-4 for difference in differences.values())

    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "use.md").read_text(), re.S)
    names: dict[str, Tensor] = {}
    found = []
    for snippet in (text for text in snippets if "probabilities" in text):
        exec(snippet.replace("runs/<id>", str(run_dir)), names)
        found.append(names["probabilities"].detach())
    assert len(found) == 3
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[2])
