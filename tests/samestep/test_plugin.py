"""The plug-in of docs/code.md, as a package of its own."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from library.tests.kit import Net, fit, rows
from samestep import plugin
from samestep.errors import ConfigError
from tests.conftest import ROOT

PAGE = (ROOT / "docs/code.md").read_text()
(CODE,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)


class OnPairs(Net):
    def loss(self, batch):
        return super().loss(batch[0])


def pairs() -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(12.0)[:, None], torch.ones(12)), batch_size=4)


@pytest.fixture(autouse=True)
def new(monkeypatch: pytest.MonkeyPatch):
    """Nothing is known of earlier plug-ins, nor later of this one."""
    plugin.load.cache_clear()
    yield
    plugin.load.cache_clear()
    sys.modules.pop("samples_seen", None)


def install(folder: Path, code: str) -> None:
    """What pip leaves of a package with the entry point of the page."""
    (folder / "samples_seen.py").write_text(code)
    info = folder / "samples_seen-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: samples-seen\nVersion: 1.0\n")
    (table,) = re.findall(r'\[project\.entry-points\."(.+)"\]\n(samples_seen) = "(.+)"', PAGE)
    group, name, value = table
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")


@pytest.mark.parametrize("how", ["installed", "named"])
def test_the_plugin_of_the_page_counts_on(tmp_path: Path, monkeypatch, how: str):
    folder = tmp_path / "packages"
    folder.mkdir()
    if how == "installed":
        install(folder, CODE)
    else:
        (folder / "samples_seen.py").write_text(CODE)
        monkeypatch.setenv("SAMESTEP_PLUGIN", "samples_seen")
    monkeypatch.syspath_prepend(folder)
    fit(tmp_path / "run", OnPairs, pairs, [(1, 1)])
    seen = [row["samples_seen"] for row in rows(tmp_path / "run") if row.get("samples_seen")]
    assert [*map(float, seen)] == [12, 24]


def test_a_plugin_that_cannot_be_imported_is_one_message(tmp_path: Path, monkeypatch):
    install(tmp_path, "import a_package_that_is_gone\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"plug-in samples_seen: .*a_package_that_is_gone"):
        fit(tmp_path / "run")
    assert not (tmp_path / "run").exists()
