"""What restarts the countdown. Runs that hang: labs/faults."""

import math
import os
from pathlib import Path
from typing import Any

import pytest

from samestep.callbacks.watchdog import Watchdog
from samestep.ranks import heartbeat

HOOKS = {  # and how many arguments Lightning gives them
    "on_train_start": 2,
    "on_train_batch_start": 4,
    "on_train_batch_end": 5,
    "on_validation_batch_start": 5,
    "on_test_batch_start": 5,
    "on_save_checkpoint": 3,
}


@pytest.fixture
def watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watchdog:
    (tmp_path / "heartbeats").mkdir()
    monkeypatch.setenv(heartbeat.FOLDER, str(tmp_path / "heartbeats"))
    return Watchdog(1000, str(tmp_path))


def limit_s(watchdog: Watchdog) -> float:
    path = watchdog.path.parents[1] / "heartbeats" / str(os.getpid())
    return heartbeat.NUMBERS.unpack_from(path.read_bytes())[1] if path.exists() else math.inf


def test_each_batch_and_each_save_is_a_heartbeat(watchdog: Watchdog):
    nothing: Any = None
    for hook, num_arguments in HOOKS.items():
        assert limit_s(watchdog) == math.inf
        getattr(watchdog, hook)(*[nothing] * num_arguments)
        assert limit_s(watchdog) == 1000, hook
        watchdog.teardown(nothing, nothing, "fit")
    assert limit_s(watchdog) == math.inf
