"""What an unmarked test may not do, seen in a pytest of its own that has these levels."""

from pathlib import Path

import pytest

from tests.conftest import run

pytestmark = pytest.mark.program

TESTS = """
import subprocess
import time
from time import sleep

import pytest

@pytest.fixture(scope="session")
def shared_run():
    subprocess.run(["true"])

@pytest.fixture
def own_run():
    subprocess.run(["true"])

def test_computes():
    time.sleep(0)

def test_reads_a_shared_run(shared_run):
    pass

@pytest.mark.program
def test_is_marked():
    subprocess.run(["true"])
    time.sleep(0.001)

@pytest.mark.nightly
def test_is_slow():
    time.sleep(0.001)

def test_starts_a_program():
    subprocess.run(["true"])

def test_starts_a_program_by_a_fixture(own_run):
    pass

def test_sleeps():
    time.sleep(0.001)

def test_sleeps_by_another_name():
    sleep(0.001)
"""

OFFENCES = {
    "test_starts_a_program": "starts ['true']",
    "test_starts_a_program_by_a_fixture": "starts ['true']",
    "test_sleeps": "sleeps 0.001 s",
    "test_sleeps_by_another_name": "sleeps 0.001 s",
}


def test_an_unmarked_test_that_starts_a_program_or_sleeps_fails(tmp_path: Path):
    (tmp_path / "test_levels.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  program\n  nightly")
    done = run("-m", "pytest", "-p", "tests.levels", "-rpE", cwd=tmp_path, COLUMNS="200")
    for name, offence in OFFENCES.items():
        assert f"ERROR test_levels.py::{name} - Failed: an unmarked test {offence}" in done.stdout
    # What an unmarked test does wrong is an error of its teardown.
    assert "8 passed, 4 errors" in done.stdout
