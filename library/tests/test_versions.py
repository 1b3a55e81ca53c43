from pkgutil import resolve_name

import pytest

from library.tests.programs import run_code
from samestep import versions
from samestep.errors import ConfigError
from samestep.ranks import compat


@pytest.mark.parametrize("name", versions.NEEDED)
def test_canary_the_name_exists(name: str):
    assert resolve_name(name)


@pytest.fixture
def without_a_name(monkeypatch: pytest.MonkeyPatch):
    versions.check.cache_clear()
    monkeypatch.setattr(versions, "NEEDED", (*versions.NEEDED, "torch.nn.parallel:Other._private"))
    yield
    versions.check.cache_clear()


@pytest.mark.usefixtures("without_a_name")
def test_a_version_that_lacks_a_name_is_rejected_before_the_first_step():
    rule = r"torch: version \S+ lacks .*torch.nn.parallel:Other._private.*Install .*torch.*>=2"
    with pytest.raises(ConfigError, match=rule):
        compat.apply(None)  # type: ignore[arg-type]


IMPORTS = """
import torch.distributed.fsdp
del torch.distributed.fsdp.FSDPModule  # torch 2.5
try:
    from samestep import Trainer
except ImportError as error:
    print("said:", error)
"""


@pytest.mark.program
def test_a_torch_that_is_too_old_is_named_where_samestep_is_imported():
    done = run_code(IMPORTS)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("said:")]
    assert "samestep: torch: version" in line
    assert "cannot import name 'FSDPModule'" in line
    assert "Install lightning" in line


def test_an_error_of_another_module_stays_what_it_is():
    assert versions.explain_import(ImportError("no", name="numpy.other")) is None
    assert versions.explain_import(ModuleNotFoundError("no", name="torch")) is None
