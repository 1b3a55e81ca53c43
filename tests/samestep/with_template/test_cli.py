"""Commands of `samestep` in this project."""

import pytest

from library.tests.test_cli import start

pytestmark = pytest.mark.program


@pytest.mark.parametrize("name", ["doctor", "launch", "sweep"])
def test_a_wrong_override_needs_no_torch(name: str):
    done = start(name, "sweep=digits_lr" if name == "sweep" else "seed=1", "modle=mlp")
    assert done.returncode == 2
    assert "did you mean model=mlp?" in done.stderr
    assert "torch" not in done.stdout
