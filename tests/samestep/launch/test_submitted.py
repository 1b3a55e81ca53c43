"""What submit was told is remembered, so that a run is found by its name alone."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from samestep.command_line import call
from samestep.errors import ConfigError
from samestep.launch import main, submitted
from tests.apiserver import Server, serve
from tests.conftest import ROOT

IMAGE = "cluster.image=ghcr.io/me/project:1.2.3"
ODD = ["data.root=$HOME/${x}", "model.net.name='a \\\\ \"b\"'", "# c: [1, 2]", "é $$ \n"]
needs_kubectl = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the user types, for a run of the name ``mine``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAMESTEP_PROJECT", str(ROOT))
    monkeypatch.setenv("RUN_ID", "mine")
    return tmp_path


@pytest.fixture
def cluster(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serve() as server:
        monkeypatch.setenv("KUBECONFIG", server.kubeconfig(here))
        monkeypatch.setenv("KUBECACHEDIR", str(here / "cache"))
        yield server


def launch(command: str, *words: str) -> int:
    function = main.main if command == "launch" else getattr(main, command)
    return call(lambda: function(words))


@pytest.mark.parametrize("first", ["cluster=swarm", "cluster=runai"])
def test_overrides_are_remembered_as_they_were_typed(here, first):
    assert submitted.remember("mine", [first, *ODD])
    assert submitted.recall("mine", []) == [first, *ODD]
    assert submitted.recall("mine", [first, "seed=1"]) == [first, *ODD, first, "seed=1"]


def test_they_are_where_the_runs_of_this_machine_are(here, monkeypatch):
    compose = submitted.compose

    def compose_with_a_place(words):
        """As if configs/train.yaml or configs/local said it."""
        return compose([f"run_root={here / 'elsewhere'}", *words])

    monkeypatch.setattr(submitted, "compose", compose_with_a_place)
    assert submitted.remember("mine", ["cluster=swarm", "run_root=/volume/of/the/pods"])
    assert [path.name for path in here.iterdir()] == ["elsewhere"]
    assert submitted.recall("mine", [])[0] == "cluster=swarm"


def test_a_project_that_needs_arguments_has_a_place_too(here, monkeypatch):
    def refuse(words):
        raise ConfigError("data.root: needs a value")

    monkeypatch.setattr(submitted, "compose", refuse)
    assert submitted.path_of("mine") == Path("runs/mine/launch.yaml")


def test_a_run_on_another_cluster_is_not_taken_for_this_one(here):
    submitted.remember("mine", ["cluster=elasticjob"])
    with pytest.raises(ConfigError, match="mine was submitted with cluster=elasticjob"):
        submitted.recall("mine", ["cluster=elastic"])


@pytest.mark.parametrize("text", ["{", "overrides: 1", "- 1", "", "overrides: [1]", "\0"])
def test_a_damaged_file_is_named(here, text):
    path = submitted.path_of("mine")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"runs/mine/launch.yaml.*delete it"):
        submitted.recall("mine", [])


def test_an_unknown_run_needs_a_cluster(here, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(here))
    assert launch("status", "mine") == 2
    said = capsys.readouterr().err
    assert "runs/mine/launch.yaml does not exist, so it was not submitted here" in said
    assert "add its cluster, such as cluster=k8s" in said
    assert submitted.recall("mine", ["cluster=swarm"]) == ["cluster=swarm"]


def test_a_name_that_leads_elsewhere_is_refused(here, capsys):
    assert launch("status", "../mine") == 2
    assert "is not the name of a run" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_changes_nothing_else(here, capsys):
    (here / "runs").write_text("a file")
    assert not submitted.remember("mine", ["cluster=swarm"])
    assert "cannot be written" in capsys.readouterr().out


@needs_kubectl
def test_a_run_is_found_by_its_name_here_and_with_its_cluster_on_other_machines(
    cluster, here, capsys
):
    cluster.namespaces.add("ml")
    place = ["cluster=elasticjob", "cluster.namespace=ml"]
    words = [*place, IMAGE, "data.root='$HOME/$$(x)'"]
    assert launch("launch", *words) == 0
    assert "  samestep cancel mine\n" in capsys.readouterr().out
    told = submitted.path_of("mine")
    assert yaml.safe_load(told.read_text()) == {"overrides": words}
    assert launch("status", "mine") == 0
    assert "ElasticJob mine: is pending" in capsys.readouterr().out

    told.unlink()  # as for a colleague
    assert launch("status", "mine", *place) == 0
    assert "ElasticJob mine: is pending" in capsys.readouterr().out
    assert launch("cancel", "mine", *place) == 0
    assert "mine: cancelled; the same submit continues it" in capsys.readouterr().out
    assert cluster.objects == {}


@needs_kubectl
def test_a_submit_that_is_refused_is_not_remembered(cluster, here, capsys):
    assert launch("launch", "cluster=k8s", IMAGE) == 0
    assert launch("launch", "cluster=k8s", IMAGE, "trainer.max_epochs=3") == 1
    assert submitted.recall("mine", []) == ["cluster=k8s", IMAGE]


@pytest.mark.parametrize(
    "secret",
    [
        "cluster.env=[{name: DB_PASSWORD, value: hunter2secret}]",
        "run_root=s3://me:hunter2secret@x/y",
    ],
)
def test_a_secret_is_neither_submitted_nor_remembered(cluster, here, secret, capsys):
    words = ["cluster=k8s", IMAGE, secret]
    assert launch("launch", *words) == 2
    assert not (here / "runs").exists()
    assert cluster.objects == {}
    assert "hunter2secret" not in str(capsys.readouterr())
