import re

import pytest

from samestep.ranks import environment


@pytest.fixture(autouse=True)
def outside_of_torchrun(monkeypatch: pytest.MonkeyPatch):
    for name in ("RUN_ID", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_without_torchrun_this_is_the_only_rank(monkeypatch):
    monkeypatch.setenv("RANK", "3")  # some schedulers set it for the pod, not for a process
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (environment.rank(), environment.world_size()) == (0, 1)
    assert (environment.local_rank(), environment.num_nodes()) == (0, 1)


def test_under_torchrun_its_numbers_count(monkeypatch):
    variables = {"RANK": 3, "WORLD_SIZE": 5, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**variables, "GROUP_WORLD_SIZE": 3, "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, str(value))
    assert (environment.rank(), environment.world_size(), environment.local_rank()) == (3, 5, 1)
    assert (environment.local_world_size(), environment.num_nodes()) == (2, 3)


def test_the_name_of_a_run_is_given_or_torchruns_but_never_none(monkeypatch):
    assert environment.run_id() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a1b2")  # left over in a shell: there is no RANK
    assert environment.run_id() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "0")
    assert environment.run_id() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a1b2")
    assert environment.run_id() == "a1b2"
    monkeypatch.setenv("RUN_ID", "mine")
    assert environment.run_id() == "mine"


def test_new_names_are_lower_case_and_differ():
    names = {environment.new_run_id("Digits", "CNN") for _ in range(100)}
    assert len(names) == 100
    assert all(re.fullmatch(r"digits-cnn-[0-9a-f]{6}", name) for name in names)


def test_variables_are_taken_from_the_processes_started_here(monkeypatch):
    monkeypatch.setenv("PET_NNODES", "2")
    before = environment.variables()
    environment.unset_variables(["PET_NNODES", "PET_NOT_THERE"])
    assert "PET_NNODES" not in environment.variables()
    assert before["PET_NNODES"] == "2"
