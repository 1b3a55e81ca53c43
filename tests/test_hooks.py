"""What the hooks of pytest add to its output."""

from pathlib import Path

import pytest

from tests.conftest import ROOT, run_pytest


def test_without_real_servers_one_line_says_so_and_how_to_run_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("SAMESTEP_KUBECONFIG", raising=False)
    monkeypatch.setenv("SAMESTEP_SERVERS", str(tmp_path))
    done = run_pytest(ROOT, "tests/labs/servers/test_logs.py")
    assert done.returncode == 0, done.stdout
    # Behind the list of all skipped tests, before the numbers.
    note, numbers = done.stdout.splitlines()[-2:]
    number = numbers.partition(" ")[0]
    assert note.startswith(f"Note: {number} tests of real servers were skipped: the servers are")
    assert "labs/servers/build.sh" in note
    assert note.endswith('make test ARGS="-m servers" runs them')
