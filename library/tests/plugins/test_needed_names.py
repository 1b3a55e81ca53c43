from pathlib import Path
from pkgutil import resolve_name

import pytest

from samestep import Trainer
from samestep.errors import ConfigError
from samestep.plugins import needed_names


@pytest.mark.parametrize("name", needed_names.NEEDED)
def test_canary_the_name_exists(name: str):
    assert resolve_name(name)


@pytest.fixture
def without_a_name(monkeypatch: pytest.MonkeyPatch):
    needed_names.check.cache_clear()
    monkeypatch.setattr(
        needed_names, "NEEDED", (*needed_names.NEEDED, "torch.nn.parallel:Other._private")
    )
    yield
    needed_names.check.cache_clear()


@pytest.mark.usefixtures("without_a_name")
def test_a_version_that_lacks_a_name_is_rejected_before_the_first_step(tmp_path: Path):
    rule = r"torch: version \S+ lacks .*torch.nn.parallel:Other._private.*Install .*torch.*>=2"
    with pytest.raises(ConfigError, match=rule):
        Trainer(run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
