"""What a run leaves that does not come to its end: why, and a report."""

import signal
import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from library.tests.kit import Scores, fit, make_spec
from samestep import ending
from samestep.callbacks.checkpoints import Checkpoints
from samestep.errors import RunError
from samestep.ranks.stopping import Stopped
from samestep.report import page
from samestep.run import record


def test_the_reason_of_an_end_is_kept(tmp_path: Path, capsys):
    options = {"max_epochs": 1, "monitor": "val/score", "mode": "max"}
    (part,) = fit(tmp_path, lambda: Scores(0.25), **options)
    reports: list[Path] = []
    how: Any = {"again": "make train", "report": reports.append}
    lost = RuntimeError("gloo/pair.cc:5] Read error [::1]:5: Connection reset by peer. GLHF!")
    for error, ended, why in (
        (Stopped(signal.SIGTERM), record.STOPPED, "SIGTERM"),
        (KeyboardInterrupt(), record.STOPPED, "KeyboardInterrupt"),
        (RunError("the disk is gone"), record.FAILED, "the disk is gone"),
        (lost, record.FAILED, "rank 0 has lost its connection to another rank"),
        (ValueError("http://me:hunter2@host " + 600 * "y"), record.FAILED, "ValueError: http://"),
    ):
        capsys.readouterr()
        with pytest.raises(type(error)), ending.recorded(make_spec(tmp_path), part.trainer, **how):
            raise error
        status = record.read(tmp_path)
        assert (status.state, status.best, status.epoch, status.step) == (ended, 0.25, 1, 4)
        assert status.why.startswith(why)
        assert "hunter2" not in status.why
        assert len(status.why) <= record.MAX_WHY
        *_, end = status.ends
        assert (end["state"], end["why"], end["step"]) == (ended, status.why, 4)
        is_stopped = isinstance(error, Stopped)
        assert ("To continue: make train\n" in capsys.readouterr().out) is is_stopped
    assert reports == [tmp_path] * 4, "at a second Ctrl-C nobody waits for a report"


class Keep(Checkpoints):
    """Of a user, who has changed a little."""


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_run_without_checkpoints_says_so(tmp_path: Path, is_kept: bool, capsys):
    callbacks = [Keep(str(tmp_path), 300)] if is_kept else []
    trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=callbacks)
    with ending.recorded(make_spec(tmp_path), trainer):
        assert ("Note: this run keeps no checkpoint" in capsys.readouterr().out) != is_kept


def test_a_stopped_run_does_not_wait_long_for_its_report(tmp_path: Path, monkeypatch, caplog):
    is_over = threading.Event()
    monkeypatch.setattr(page, "write", lambda run_dir: is_over.wait(20))
    monkeypatch.setattr(ending, "REPORT_S", 0.05)
    ending.write_in_time(tmp_path, page.write_or_warn)
    is_over.set()
    (message,) = caplog.messages
    assert f"`samestep report {tmp_path}` writes it" in message
