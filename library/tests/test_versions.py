import pytest

from library.tests.programs import run_code
from samestep import versions

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
