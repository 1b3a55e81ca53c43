import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from samestep.ranks.secrets import redact_values
from samestep.run.files import write_text
from samestep.run.records import code_state, log_to_files, record_attempt
from tests.conftest import run


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout with one commit."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "a.py").write_text("old = 1\n")
    git(code, "init", "--quiet")
    git(code, "add", ".")
    git(code, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "first")
    return code


def test_a_device_is_never_replaced_by_a_file(tmp_path: Path):
    """Root could do so: samestep report --output /dev/stdout."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FileExistsError, match="is no regular file"):
        write_text(pipe, "text")
    for folder in (tmp_path, Path()):
        with pytest.raises(IsADirectoryError):
            write_text(folder, "text")
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def git(code: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=code, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_secrets_are_found_by_name_and_by_value(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAKE_TOKEN", "sesame-open-123")
    assert redact_values(
        {
            "api_key": "x", "hf_token": "x", "db": {"PASSWORD": "x"}, "aws_secret": ["x"],
            "plain": ["a sesame-open-123 b"], "mirror": "http://me:pw@host/path",
            "tokenizer": "bert", "num_token": 5, "key": None, "passwords_seen": True,
        }
    ) == {
        "api_key": "***", "hf_token": "***", "db": {"PASSWORD": "***"}, "aws_secret": ["***"],
        "plain": ["a *** b"], "mirror": "http://***@host/path",
        "tokenizer": "bert", "num_token": 5, "key": None, "passwords_seen": True,
    }  # fmt: skip


def test_a_clean_checkout_is_its_commit(checkout: Path):
    assert code_state(checkout) == (git(checkout, "rev-parse", "HEAD"), "")


def test_what_has_a_secret_name_is_hidden_in_uncommitted_files(checkout: Path):
    (checkout / "a.py").write_text("PASSWORD = 'hunter2'\ntoken = next(tokens)\nname = 'a'\n")
    (checkout / "b.yaml").write_text("server:\n  password: hunter2\n  user: me\n")
    git(checkout, "add", "b.yaml")
    _, diff = code_state(checkout)
    assert "hunter2" not in diff
    assert "+PASSWORD = '***'\n+token = next(tokens)\n+name = 'a'\n" in diff
    assert "+  password: ***\n+  user: me\n" in diff


def test_uncommitted_code_is_kept_without_secrets(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAKE_SECRET", "sesame-open-123")
    (checkout / "a.py").write_text("new = 2  # sesame-open-123\n")
    (checkout / "staged.py").write_text("staged = 3\n")
    git(checkout, "add", "staged.py")
    (checkout / "untracked.py").write_text("not shown")
    _, diff = code_state(checkout)
    assert "-old = 1\n+new = 2  # ***\n" in diff
    assert "+staged = 3\n" in diff
    assert "?? untracked.py\n" in diff
    git(checkout, "stash", "--quiet")  # the diff brings the same code back
    (checkout / "git.diff").write_text(diff)
    git(checkout, "apply", "git.diff")
    assert (checkout / "a.py").read_text() == "new = 2  # ***\n"


def test_code_without_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert code_state(tmp_path) == (None, "")
    monkeypatch.setenv("PATH", "")
    assert code_state(tmp_path) == (None, "")
    monkeypatch.setenv("PROJECT_REVISION", "4f2a")
    assert code_state(tmp_path) == ("4f2a", "")


def test_each_start_is_recorded_with_the_newest_code(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(checkout)
    for text in ("one", "two"):
        (checkout / "a.py").write_text(text)
        record_attempt(tmp_path, ["train.py", "logger.wandb.api_key=abc", "seed=5"], seed=5)
    attempts = json.loads((tmp_path / "environment.json").read_text())
    assert [attempt["git"]["dirty"] for attempt in attempts] == [True, True]
    assert "+two" in (tmp_path / "git.diff").read_text()
    first = attempts[0]
    assert first["command"] == ["train.py", "logger.wandb.api_key=***", "seed=5"]
    assert first["seed"] == 5
    assert first["packages"]["pytest"] == pytest.__version__
    assert first["world_size"] == 1
    assert first["cpu_cores"] >= 1
    assert first["python"] == ".".join(map(str, sys.version_info[:3]))


def test_a_text_that_cannot_be_written_leaves_the_old_one(tmp_path: Path):
    path = tmp_path / "file.txt"
    write_text(path, "old")
    (tmp_path / ".file.txt.partial").mkdir()
    with pytest.raises(IsADirectoryError, match=r"file\.txt"):
        write_text(path, "new")
    assert path.read_text() == "old"


LOGGING = """
import logging, sys, warnings
from pathlib import Path
import lightning as L
from samestep.run.records import log_to_files
log_to_files(Path(sys.argv[1]))
logging.getLogger("some.library").info("chatter")
logging.getLogger("some.library").warning("token sesame-open-123 is old")
warnings.warn("look\\nhere")
L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=False)
"""


def test_everything_is_logged_and_rank_zero_shows_warnings(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-0.log").write_text("earlier\n")
    script = tmp_path / "script.py"
    script.write_text(LOGGING)
    result = run(str(script), str(tmp_path), FAKE_TOKEN="sesame-open-123")
    assert result.returncode == 0, result.stderr
    log = (tmp_path / "logs/rank-0.log").read_text()
    assert log.startswith("earlier\n")
    assert "INFO some.library: chatter\n" in log
    assert "INFO lightning.pytorch.utilities.rank_zero: GPU available" in log
    assert "WARNING some.library: token *** is old\n" in log
    assert "UserWarning: look\nhere" in log
    assert result.stderr.startswith(
        f"WARNING: token *** is old\nWARNING: {script}:9: UserWarning: look"
    )
    assert result.stdout == ""


@pytest.fixture
def _same_loggers() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.mark.parametrize("kind", ["folder", "fifo", "dangling link"])
@pytest.mark.usefixtures("_same_loggers")
def test_something_in_the_way_of_a_log_does_not_end_the_run(tmp_path: Path, kind: str, caplog):
    path = tmp_path / "logs/rank-0.log"
    path.parent.mkdir()
    match kind:
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case _:
            path.symlink_to("/proc/nowhere")
    log_to_files(tmp_path)
    logging.getLogger("x").warning("is said")
    if kind == "dangling link":
        assert "rank-0.log cannot be written: No such file" in caplog.text
        return
    assert "is said" in path.read_text()
    assert path.with_name("rank-0.log.damaged").exists()


@pytest.mark.usefixtures("_same_loggers")
def test_each_run_of_a_sweep_and_each_rank_has_a_log_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    for name, rank in (("one", 0), ("two", 1)):
        monkeypatch.setenv("RANK", str(rank))
        log_to_files(tmp_path / name)
        logging.getLogger("x").warning("in %s", name)
    assert "in two" not in (tmp_path / "one/logs/rank-0.log").read_text()
    assert "in two" in (tmp_path / "two/logs/rank-1.log").read_text()
    assert capsys.readouterr().err == "WARNING: in one\n"
