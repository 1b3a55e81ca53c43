"""What submit was told is remembered, so that a run is found by its name alone."""

from pathlib import Path

import pytest

from samestep.command_line import call
from samestep.errors import ConfigError
from samestep.launch import main, submissions
from tests.conftest import ROOT

IMAGE = "cluster.image=ghcr.io/me/project:1.2.3"
ODD = ["data.root=$HOME/${x}", "model.net.name='a \\\\ \"b\"'", "# c: [1, 2]", "é $$ \n"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the user types, for a run of the name ``mine``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAMESTEP_PROJECT", str(ROOT))
    monkeypatch.setenv("RUN_ID", "mine")
    return tmp_path


def launch(command: str, *words: str) -> int:
    function = main.main if command == "launch" else getattr(main, command)
    return call(lambda: function(words))


@pytest.mark.parametrize("first", ["cluster=swarm", "cluster=runai"])
def test_overrides_are_remembered_as_they_were_typed(here, first):
    assert submissions.save("mine", [first, *ODD])
    assert submissions.load("mine", []) == [first, *ODD]
    assert submissions.load("mine", [first, "seed=1"]) == [first, *ODD, first, "seed=1"]


def test_they_are_where_the_runs_of_this_machine_are(here, monkeypatch):
    (here / "configs/local").mkdir(parents=True)
    (here / "configs/train.yaml").write_text("run_root: runs\ndata: {root: '???'}")
    monkeypatch.setenv("SAMESTEP_PROJECT", str(here))
    assert submissions.path_of("mine") == Path("runs/mine/launch.yaml")
    (here / "configs/local/default.yaml").write_text(f"run_root: {here / 'elsewhere'}")
    assert submissions.save("mine", ["cluster=swarm", "run_root=/volume/of/the/pods"])
    assert (here / "elsewhere/mine/launch.yaml").is_file()
    assert submissions.load("mine", [])[0] == "cluster=swarm"


def test_a_run_on_another_cluster_is_not_taken_for_this_one(here):
    submissions.save("mine", ["cluster=pytorchjob"])
    with pytest.raises(ConfigError, match="mine was submitted with cluster=pytorchjob"):
        submissions.load("mine", ["cluster=elastic"])


@pytest.mark.parametrize("text", ["{", "overrides: 1", "- 1", "", "overrides: [1]", "\0"])
def test_a_damaged_file_is_named(here, text):
    path = submissions.path_of("mine")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"runs/mine/launch.yaml.*delete it"):
        submissions.load("mine", [])


def test_an_unknown_run_needs_a_cluster(here, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(here))
    assert launch("status", "mine") == 2
    said = capsys.readouterr().err
    assert "runs/mine/launch.yaml does not exist, so it was not submitted here" in said
    assert "add its cluster, such as cluster=k8s" in said
    assert submissions.load("mine", ["cluster=swarm"]) == ["cluster=swarm"]
    Path("runs/mine/logs").mkdir(parents=True)
    assert launch("logs", "mine") == 2
    assert "mine: was trained here, not submitted; its messages are in runs/mine/logs" in (
        capsys.readouterr().err
    )


def test_a_name_that_leads_elsewhere_is_refused(here, capsys):
    assert launch("status", "../mine") == 2
    assert "is not the name of a run" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_changes_nothing_else(here, capsys):
    (here / "runs").write_text("a file")
    assert not submissions.save("mine", ["cluster=swarm"])
    assert "cannot be written" in capsys.readouterr().out


@pytest.mark.parametrize(
    "secret",
    [
        "cluster.env=[{name: DB_PASSWORD, value: hunter2secret}]",
        "run_root=s3://me:hunter2secret@x/y",
    ],
)
def test_a_secret_is_neither_submitted_nor_remembered(here, secret, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no kubectl is asked
    words = ["cluster=k8s", IMAGE, secret]
    assert launch("launch", *words) == 2
    assert not (here / "runs").exists()
    assert "hunter2secret" not in str(capsys.readouterr())
