import math
import os
from pathlib import Path

import pytest

from samestep.ranks import heartbeat
from samestep.ranks.heartbeat import Heartbeat


def test_the_agent_reads_when_there_was_progress_and_when_there_must_be_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(heartbeat.FOLDER, str(tmp_path))
    rank = Heartbeat()
    assert heartbeat.read(tmp_path, os.getpid())[1] == math.inf
    rank.beat(7.5)
    age, limit_s = heartbeat.read(tmp_path, os.getpid())
    assert (0 <= age < 7.5, limit_s) == (True, 7.5)
    rank.pause()
    assert heartbeat.read(tmp_path, os.getpid())[1] == math.inf


def test_a_rank_without_a_heartbeat_has_no_limit(tmp_path: Path):
    assert heartbeat.read(tmp_path, 7) == (0, math.inf)
    (tmp_path / "7").touch()  # it is being made
    assert heartbeat.read(tmp_path, 7) == (0, math.inf)


@pytest.mark.parametrize("folder", ["", "gone"])
def test_a_rank_whose_agent_asks_for_nothing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
):
    monkeypatch.setenv(heartbeat.FOLDER, folder and str(tmp_path / folder))
    Heartbeat().beat(1)
    assert not list(tmp_path.iterdir())
