import json
import os
from pathlib import Path

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from samestep.errors import ConfigError, RunError
from samestep.ranks import environment, failure, process_group


@pytest.fixture
def rank_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend to be rank 1 of torchrun's; gives its error file."""
    path = tmp_path / "error.json"
    variables = {"RANK": 1, "LOCAL_RANK": 1, "TORCHELASTIC_RUN_ID": "x"}
    for name, value in {**variables, "TORCHELASTIC_ERROR_FILE": path}.items():
        monkeypatch.setenv(name, str(value))
    return path


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_one_process_prints_what_the_user_can_mend_in_one_line(capsys, monkeypatch):
    monkeypatch.setenv("A_PASSWORD", "sesame-open-123")
    assert failure.report(raised(ConfigError("seed=x: sesame-open-123"))) == 2
    assert failure.report(raised(RunError("no data"))) == 1
    assert capsys.readouterr() == ("", "error: seed=x: ***\nerror: no data\n")


def test_any_other_error_prints_its_traceback_without_secrets(capsys):
    assert failure.report(raised(OSError("ftp://me:pw@host refuses"))) == 1
    _, printed = capsys.readouterr()
    assert printed.startswith("Traceback (most recent call last):")
    assert printed.endswith("OSError: ftp://***@host refuses\n")


@pytest.mark.parametrize(
    ("error", "message"),
    [(RunError("why"), "error: why"), (ValueError("why"), "ValueError: why")],
)
def test_torchruns_agent_learns_the_message(rank_one: Path, error: Exception, message: str):
    failure.report(raised(error))
    failed = ProcessFailure(local_rank=1, pid=1, exitcode=1, error_file=str(rank_one))
    assert failed.message["message"] == message  # type: ignore[index]
    extra = failed.error_file_data["message"]["extraInfo"]
    assert failed.timestamp == extra["time_ns"] // 10**9
    assert [path.name for path in rank_one.parent.iterdir()] == ["error.json"]


def test_the_first_error_of_a_rank_counts(rank_one: Path):
    failure.record(RunError("first"))
    failure.record(RunError("second"))
    assert json.loads(rank_one.read_text())["message"]["message"] == "error: first"


@pytest.mark.parametrize("kind", [RunError, ConfigError])
def test_an_error_of_several_ranks_is_printed_by_the_first(rank_one: Path, capsys, kind):
    store = HashStore()
    for first_rank, printed in ((0, ""), (1, "error: the loss is nan\n")):
        store.set("error", json.dumps([first_rank, 1, "error: the loss is nan"]))
        failure.report(process_group.publish_error(store, kind("the loss is nan")))
        assert capsys.readouterr().err == printed
    assert "the loss is nan" in rank_one.read_text()
    failure.report(process_group.publish_error(store, kind("only here")))
    assert capsys.readouterr().err == "error: only here\n"


def test_before_the_ranks_meet_one_of_a_node_prints_what_all_raise(rank_one, capsys, monkeypatch):
    for local_rank, printed in (("1", ""), ("0", "error: lr=-1\n")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        failure.report(ConfigError("lr=-1"))
        assert capsys.readouterr().err == printed
    monkeypatch.setenv("LOCAL_RANK", "1")
    failure.report(RunError("no route"))
    assert capsys.readouterr().err == "error: no route\n"


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_before_the_ranks_meet_our_agent_prints_what_all_raise(
    rank_one: Path, capsys, monkeypatch, local_rank: str
):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv(environment.AGENT, str(environment.parent()))
    failure.report(ConfigError("lr=-1"))
    assert capsys.readouterr().err == ""
    left = json.loads(rank_one.read_text())["message"]
    assert left["message"] == "error: lr=-1"
    assert left["extraInfo"]["printing_rank"] == failure.BY_AGENT


def test_a_program_that_a_rank_starts_prints_its_errors(rank_one: Path, capsys, monkeypatch):
    """It inherits the variables of the rank, and no agent knows it."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv(environment.AGENT, str(os.getpid()))
    failure.report(ConfigError("lr=-1"))
    assert capsys.readouterr().err == "error: lr=-1\n"


def test_an_error_file_that_cannot_be_written_is_no_second_error(rank_one: Path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(rank_one / "nowhere/error.json"))
    assert failure.report(RunError("why")) == 1
