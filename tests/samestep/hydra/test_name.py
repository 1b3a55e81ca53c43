import pytest

from samestep.errors import ConfigError
from samestep.hydra.compose import check
from samestep.hydra.front_end import name_run


@pytest.fixture(autouse=True)
def _no_names_from_outside(monkeypatch):
    for variable in ("RUN_ID", "TORCHELASTIC_RUN_ID", "RANK"):
        monkeypatch.delenv(variable, raising=False)


def test_a_new_name_is_made_of_the_choices():
    names = {name_run(check(["model=mlp"])) for _ in range(2)}
    assert len(names) == 2
    for name in names:
        assert name.startswith("digits-mlp-")
        assert len(name.removeprefix("digits-mlp-")) == 6


def test_a_given_name_counts_and_the_configuration_more_than_the_variable(monkeypatch):
    monkeypatch.setenv("RUN_ID", "mine")
    assert name_run(check([])) == "mine"
    assert name_run(check(["run_id=other"])) == "other"


def test_a_name_that_is_no_directory_is_refused(monkeypatch):
    monkeypatch.setenv("RUN_ID", "a/b")
    with pytest.raises(ConfigError, match=r"RUN_ID=a/b: must be at most 63 of"):
        name_run(check([]))
