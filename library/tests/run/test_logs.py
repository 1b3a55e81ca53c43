import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from library.tests.programs import run
from samestep.run.logs import log_to_files

LOGGING = """
import logging, sys, warnings
from pathlib import Path
import lightning as L
from samestep.run.logs import log_to_files
log_to_files(Path(sys.argv[1]))
logging.getLogger("some.library").info("chatter")
logging.getLogger("some.library").warning("token sesame-open-123 is old")
warnings.warn("look\\nhere")
L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=False)
"""


@pytest.mark.program
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
