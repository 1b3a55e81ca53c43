"""What a run leaves that does not come to its end: why, and a report."""

import signal
import threading
from pathlib import Path

import pytest

from samestep import ending
from samestep.callbacks.checkpoints import LastCheckpoint
from samestep.callbacks.run_state import RunState
from samestep.errors import RunError
from samestep.hydra import build
from samestep.hydra.adapter import spec_of
from samestep.ranks.stopping import Stopped
from samestep.report import page
from samestep.run import record
from samestep.run.history import History
from samestep.spec import RunSpec
from tests.samestep.callbacks.tiny import Tiny, fit


def spec_in(run_dir: Path) -> RunSpec:
    (run_dir / "logs").mkdir()
    return RunSpec("test", run_dir, 0)


@pytest.mark.parametrize(
    ("error", "ended", "why"),
    [
        (Stopped(signal.SIGTERM), record.STOPPED, "SIGTERM"),
        (KeyboardInterrupt(), record.STOPPED, "KeyboardInterrupt"),
        (RunError("the disk is gone"), record.FAILED, "the disk is gone"),
        (KeyError("x"), record.FAILED, "KeyError: 'x'"),
        (
            RuntimeError("gloo/pair.cc:5] Read error [::1]:5: Connection reset by peer. GLHF!"),
            record.FAILED,
            "rank 0 has lost its connection to another rank",
        ),
        (ValueError("http://me:hunter2@host " + 600 * "y"), record.FAILED, "ValueError: http://"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_reason_of_an_end_is_kept(
    tmp_path: Path, capsys, error: BaseException, ended: str, why: str
):
    spec = spec_in(tmp_path)
    trainer = fit(tmp_path, Tiny([0.25]), RunState(str(tmp_path)), max_epochs=1)
    how = {"again": "make train", "report": page.write_or_warn}
    with pytest.raises(type(error)), ending.recorded(spec, trainer, **how):
        raise error
    status = record.read(tmp_path)
    assert status.state == ended
    assert status.why.startswith(why)
    assert "hunter2" not in status.why
    assert len(status.why) <= record.MAX_WHY
    assert (status.best, status.epoch, status.step) == (0.25, 1, 4)
    (end,) = record.read(tmp_path).ends
    assert (end["state"], end["why"], end["step"]) == (ended, status.why, 4)
    assert ("To continue: make train\n" in capsys.readouterr().out) == isinstance(error, Stopped)
    # At a second Ctrl-C nobody waits for a report.
    assert (tmp_path / page.NAME).exists() == (not isinstance(error, KeyboardInterrupt))


class KeepLast(LastCheckpoint):
    """Of a user, who has changed a little."""


@pytest.mark.parametrize(
    ("override", "is_said"),
    [
        ("callbacks=default", False),
        ("callbacks=null", True),
        ("~callbacks.last", True),
        ("callbacks.last._target_=tests.samestep.test_ending.KeepLast", False),
    ],
)
def test_a_run_without_checkpoints_says_so(compose, override: str, is_said: bool, capsys):
    cfg = compose(override)
    with ending.recorded(spec_of(cfg), build.trainer(cfg, History(cfg.run_dir))):
        assert ("Note: this run keeps no checkpoint" in capsys.readouterr().out) == is_said


def test_a_stopped_run_does_not_wait_long_for_its_report(tmp_path: Path, monkeypatch, caplog):
    is_over = threading.Event()
    monkeypatch.setattr(page, "write", lambda run_dir: is_over.wait(20))
    monkeypatch.setattr(ending, "REPORT_S", 0.05)
    ending.write_in_time(tmp_path, page.write_or_warn)
    is_over.set()
    (message,) = caplog.messages
    assert f"`samestep report {tmp_path}` writes it" in message
