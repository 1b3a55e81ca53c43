"""The account of a run's wall time, also of one that is killed."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import lightning as L
import pytest

from library.tests import kit
from library.tests.kit import Net, batches, fit
from library.tests.programs import run_code
from samestep.plugins import time_file, wall_time
from samestep.plugins.time_file import COMPILE, REPEATED, Start
from samestep.plugins.wall_time import Clock, on_compiling, time_of_start
from samestep.report.wall_time import account_of, add_up
from samestep.run import phases, record
from samestep.run.layout import TIME
from samestep.run.phases import AWAY, DATA, IMPORT, SAVING, START, TRAINING, VALIDATION


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> kit.Clock:
    """The time of a process that imports for a second; no thread reads it."""
    clock = kit.Clock()
    monkeypatch.setattr(wall_time, "time", clock)
    monkeypatch.setattr(wall_time, "EVERY_S", 1000)
    monkeypatch.setattr(wall_time, "_clock", Clock(clock.now, IMPORT))
    clock.now += 1
    return clock


class Timed(Net):
    """Spends 2 s in each step, 3 s compiling, and 4 s in each batch of a validation or test."""

    def __init__(self, clock: kit.Clock) -> None:
        super().__init__()
        self.time = clock

    def training_step(self, batch, batch_idx):
        self.time.now += 1
        wall_time.begin_compile()
        self.time.now += 3
        wall_time.end_compile()
        self.time.now += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.time.now += 4
        return super().validation_step(batch, batch_idx)

    test_step = validation_step


class TimedSave(L.Callback):
    """Spends 5 s while a checkpoint is saved."""

    def __init__(self, clock: kit.Clock) -> None:
        self.time = clock

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.time.now += 5


class Numbers:
    """Data of which each batch takes 6 s to read."""

    def __init__(self, clock: kit.Clock) -> None:
        self.time = clock

    def __iter__(self):
        for batch in batches():
            self.time.now += 6
            yield batch

    def __len__(self):
        return len(batches())


def test_a_test_after_the_run_counts(tmp_path, clock):
    (done,) = fit(tmp_path, lambda: Timed(clock))
    before = wall_time.current().as_start()
    done.trainer.test(done.module, batches(shuffle=False), verbose=False)
    (after,) = starts_of(tmp_path)
    assert after.seconds == {**before.seconds, VALIDATION: before.seconds[VALIDATION] + 4 * 4}
    assert before.ended + 4 * 4 == after.ended == clock.now


def starts_of(run_dir: Path) -> list[Start]:
    """What the starts have spent, when the clock of the newest has stopped."""
    wall_time.current().close()
    return time_file.read_starts(run_dir, record.read(run_dir).starts)


def test_seconds_are_shared_out_among_causes(tmp_path, clock):
    began = clock.now - 1
    fit(
        tmp_path,
        lambda: Timed(clock),
        lambda: Numbers(clock),
        callbacks=lambda: [TimedSave(clock)],
    )
    (start,) = starts_of(tmp_path)
    # Two epochs of four batches, and a save and a validation at the end of each.
    assert start.step == 8
    spent = {cause: seconds for cause, seconds in start.seconds.items() if seconds}
    assert spent == {
        IMPORT: 1, START: 5,  # for the checkpoint that is tried
        TRAINING: 8 * 2, COMPILE: 8 * 3, VALIDATION: 8 * 4, SAVING: 2 * 5, DATA: 8 * 6,
    }  # fmt: skip
    # All of the time since the process began; nothing counts twice.
    assert (start.began, start.ended) == (began, clock.now)
    assert record.read(tmp_path).start["spent"]["step"] == 8


def test_a_second_run_of_a_process_begins_where_the_first_has_ended(tmp_path, clock):
    fit(tmp_path / "one", lambda: Timed(clock))
    between = clock.now
    fit(tmp_path / "two", lambda: Timed(clock))
    (start,) = starts_of(tmp_path / "two")
    assert start.seconds[IMPORT] == 0
    assert start.began == between


SLOW = """
import time
from library.tests import small
step = small.Net.training_step
def slow_step(self, batch, batch_idx):
    time.sleep(0.01)
    return step(self, batch, batch_idx)
small.Net.training_step = slow_step
small.main()
"""


def small(run_dir: Path, at: int) -> tuple[float, float]:
    """Train; SIGKILL within the step after ``at`` steps. When the program began and ended."""
    options = json.dumps({"run_dir": str(run_dir), "max_epochs": 3})
    began = time.time()
    done = run_code(SLOW, options, AT=str(at), HOW="SIGKILL")
    ended = time.time()
    assert done.returncode == (0 if at < 0 else -signal.SIGKILL), done.stderr
    return began, ended


@pytest.mark.program
def test_a_run_that_is_killed_twice_accounts_for_its_time(tmp_path):
    run_dir = tmp_path / "mine"
    # An epoch has eight steps, and a checkpoint at its end.
    times = []
    for at in (13, 19, -1):
        times.append(small(run_dir, at))
        time.sleep(1)
    starts = starts_of(run_dir)
    assert [(start.first_step, start.step) for start in starts] == [(0, 13), (8, 19), (16, 24)]
    account = account_of(run_dir, record.read(run_dir))
    assert account.repeated_steps == (13 - 8) + (19 - 16)
    assert starts[0].seconds[REPEATED] == 0
    assert all(start.seconds[REPEATED] > 0 for start in starts[1:])
    for start, (_, ended), (began, _) in zip(starts[1:], times, times[1:], strict=False):
        # The system counts the start of a process in hundredths of a second.
        assert start.began >= began - 0.02
        assert start.away >= began - ended - 0.02
    # Every second is accounted for, once.
    total = starts[-1].ended - starts[0].began
    assert account.total_s == pytest.approx(total, abs=0.01)
    assert account.seconds[AWAY] == sum(start.away for start in starts)
    assert account.process_hours == pytest.approx(
        (account.total_s - account.seconds[AWAY]) / 3600, rel=1e-6
    )


def make_start(**facts) -> Start:
    seconds = dict.fromkeys(time_file.CAUSES, 0.0)
    default = {"began": 0.0, "away": 0.0, "first_step": 0, "step": 0, "device": "cpu"}
    return Start(**default | {"num_ranks": 1, "seconds": seconds} | facts)


def test_steps_that_are_lost_twice_are_repeated_twice():
    starts = [
        make_start(step=20),
        make_start(first_step=10, step=15),
        make_start(first_step=10, step=30),
    ]
    assert time_file.count_repeated_steps(starts) == 5 + 10


def test_a_step_is_repeated_until_the_furthest_one(tmp_path, clock):
    own = Clock(clock.now, TRAINING)
    own.open(tmp_path, [make_start(step=3)], 1, goes_on=True)
    for step in (1, 3):
        own.count_step(step)
        for cause in (DATA, TRAINING, SAVING):
            own.switch(cause)
            clock.now += step
    own.close()
    spent = {cause: seconds for cause, seconds in own.seconds().items() if seconds}
    assert spent == {REPEATED: 1 + 1, DATA: 3, TRAINING: 3, SAVING: 1 + 3}
    assert own.waited_s == 1 + 3


def test_a_notebook_counts_no_further_than_its_run(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(wall_time, "is_interactive", lambda: True)
    fit(tmp_path, lambda: Timed(clock))
    ended = clock.now
    clock.now += 1000
    (start,) = time_file.read_starts(tmp_path, record.read(tmp_path).starts)
    assert start.ended == ended


def test_a_run_that_is_rolled_back_is_counted_no_further(tmp_path, clock):
    fit(tmp_path, lambda: Timed(clock))
    own = wall_time.current()
    phases.switch(phases.AWAY)
    assert own.has_ended
    assert wall_time.find_spent(tmp_path) == {}


def test_the_time_since_a_run_had_finished_is_not_away(tmp_path):
    earlier = make_start(began=time.time() - 1000)
    clock = Clock(time.time(), TRAINING)
    clock.open(tmp_path, [earlier], 0, goes_on=False)
    assert clock.away == 0
    clock.close()


@pytest.mark.parametrize("content", [b"", b"short", b"x" * time_file.SIZE])
def test_a_damaged_file_loses_no_more_than_itself(tmp_path, content):
    (tmp_path / TIME).write_bytes(content)
    entries = [{"spent": time_file.to_entry(make_start(step=7))}, {"command": ["old"]}]
    assert time_file.read_starts(tmp_path, entries) == [make_start(step=7)]


def test_a_file_that_cannot_be_written_ends_no_run(tmp_path):
    (tmp_path / TIME).mkdir()
    fit(tmp_path)
    (start,) = starts_of(tmp_path)
    assert start.step == 8


def test_accounts_add_up(tmp_path):
    fit(tmp_path)
    account = account_of(tmp_path, record.read(tmp_path))
    both = add_up([account, account])
    assert both.total_s == pytest.approx(2 * account.total_s)
    assert both.goodput == pytest.approx(account.goodput)
    assert both.process_hours == pytest.approx(2 * account.process_hours)


def test_torch_says_when_it_compiles():
    """Twice, because ``torch.compiler.reset`` forgets who wants to know."""
    import torch._dynamo

    seen: list[str] = []

    def begin(*_: object) -> None:
        seen.append("begin")

    def end(*_: object) -> None:
        seen.append("end")

    for _ in range(2):
        torch.compiler.reset()
        on_compiling(begin, end)
        on_compiling(begin, end)
        compiled = torch.compile(torch.nn.Linear(1, 1), backend="eager")
        compiled(torch.ones(1, 1))
        compiled(torch.ones(1, 1))
    assert seen == ["begin", "end"] * 2
    torch.compiler.reset()


@pytest.mark.program
def test_the_time_of_a_start_is_known(monkeypatch: pytest.MonkeyPatch):
    before = time.time()
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
        after = time.time()
        try:
            started = time_of_start(process.pid)
            assert started is not None
            # The system counts in hundredths of a second.
            assert before - 0.02 <= started <= after + 0.02
            monkeypatch.setattr(Path, "exists", lambda path: False)
            started = time_of_start(process.pid)
            assert started is not None
            # And ps in seconds.
            assert before - 2 <= started <= after + 2
        finally:
            os.killpg(process.pid, signal.SIGKILL)
