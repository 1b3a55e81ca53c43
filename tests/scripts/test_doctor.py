"""The doctor as a user calls it."""

from pathlib import Path

import pytest

from samestep import doctor
from samestep.command_line import call
from samestep.ranks import environment
from tests.conftest import run


@pytest.fixture
def examine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Call the doctor in this process; gives the exit code, stdout and stderr."""
    monkeypatch.setattr(environment, "limit_threads", lambda: None)

    def examine(*words: str) -> tuple[int, str, str]:
        return call(lambda: doctor.main(words)), *capsys.readouterr()

    return examine


def test_one_process_is_fit_and_nothing_is_left_behind(examine, tmp_path: Path):
    code, said, errors = examine(f"run_root={tmp_path}")
    assert (code, errors) == (0, "")
    assert [line.split()[0] for line in said.splitlines()] == ["ok"] * 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.program
def test_two_processes_are_started_as_train_starts_them(tmp_path: Path):
    words = ["trainer.devices=2", f"run_root={tmp_path}"]
    result = run("-m", "samestep", "doctor", *words)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = {tuple(line.split()[:2]): line for line in result.stdout.splitlines()}
    assert {result for result, _ in lines} == {"ok"}
    assert "ranks: 2" in lines["ok", "world"]
    assert result.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_missing_data_is_a_failed_check(examine, tmp_path: Path):
    where = [f"data.root={tmp_path}", f"run_root={tmp_path}"]
    code, said, _ = examine("data=mnist", "cluster=k8s", *where)
    (failed,) = [line for line in said.splitlines() if not line.startswith("ok")]
    assert code == 1
    assert failed.startswith("failed   data           rank 0: missing or damaged; ")
    assert "prepare_data" in failed


def test_wrong_configuration_has_its_own_exit_code(examine, tmp_path: Path):
    (tmp_path / "file").touch()
    code, said, _ = examine(f"run_root={tmp_path}/file")
    assert code == 2
    assert "failed   run directory" in said
    code, said, errors = examine("modle=mlp")
    assert (code, said) == (2, "")
    assert "did you mean model=mlp?" in errors


# What the configuration shows, and what the built run shows: tests/test_command_lines.py has more.
@pytest.mark.parametrize("override", ["trainer.max_time=abc", "data.num_classes=9"])
def test_what_train_refuses_is_refused_here_too(examine, tmp_path: Path, override: str):
    code, said, errors = examine(f"run_root={tmp_path}", override)
    assert (code, said) == (2, "")
    assert errors.startswith("error: ")
    assert {"max_time": "max_time", "num_classes": "not 9"}[
        override.split("=")[0].split(".")[1]
    ] in errors
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_rank_zero_that_cannot_be_found(examine, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "node-0.invalid")
    code, said, errors = examine(f"run_root={tmp_path}", "cluster.timeout_s=0.1")
    assert (code, said) == (1, "")
    assert errors.startswith(
        "error: rank 0: MASTER_ADDR=node-0.invalid: no route to node-0.invalid after 0.1 s"
    )
