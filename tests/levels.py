"""The levels of tests: ``make test``, ``make test-programs``, ``make test-all``.

An unmarked test belongs to ``make test``. It runs in the process of pytest, starts no program and
does not sleep, so that it is quick and no busy machine makes it fail. What needs a program, a
signal or real time is marked ``program``; what is too slow for each push is marked ``nightly``.

Runs that many tests read may be programs: fixtures that tests share start each of them once.
"""

import platform
import sys
import threading
import time
from collections.abc import Generator

import pytest

MARKERS = ("program", "nightly")

is_watching = False
offences: list[str] = []
sleep = time.sleep


def note_program(event: str, arguments: tuple[object, ...]) -> None:
    """An audit hook: Python calls it before each program that this process starts."""
    if is_watching and event in ("subprocess.Popen", "os.posix_spawn", "os.system", "os.exec"):
        offences.append(f"starts {arguments[1] if event == 'subprocess.Popen' else arguments[0]}")


def note_sleep(seconds: float) -> None:
    """``time.sleep``, for as long as pytest runs. Threads of the library may wait for work."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_watching and is_main and seconds > 0:
        offences.append(f"sleeps {seconds} s")
    sleep(seconds)


def pytest_configure() -> None:
    # It starts ``uname`` once in a process: the first test to ask would be to blame.
    platform.processor()
    sys.addaudithook(note_program)
    time.sleep = note_sleep


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the instruments to the night; those that are quick enough are marked ``program``."""
    for item in items:
        if "tests/labs/" in item.nodeid and not item.get_closest_marker("program"):
            item.add_marker("nightly")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Watch what an unmarked test does, with its fixtures."""
    global is_watching
    is_watching = not any(item.get_closest_marker(name) for name in MARKERS)
    offences.clear()
    try:
        return (yield)
    finally:
        is_watching = False


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef) -> Generator[None, object, object]:
    """Let fixtures that tests share start the runs that they read."""
    global is_watching
    before = is_watching
    if fixturedef.scope != "function":
        is_watching = False
    try:
        return (yield)
    finally:
        is_watching = before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    """Fail an unmarked test that has started a program or has slept."""
    yield
    if offences:
        pytest.fail(f"an unmarked test {offences[0]}: mark it program, or do it in this process")
