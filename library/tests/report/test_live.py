"""The live page: what its server sends, and to whom."""

import fcntl
import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock
from urllib.error import HTTPError

import pytest

from library.tests.programs import environment
from library.tests.report.fake import make_run
from samestep.errors import ConfigError
from samestep.report import live, overview
from samestep.run import lock, record


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder of runs, and the address that the command has printed."""
    folder = tmp_path_factory.mktemp("served") / "runs"
    make_run(folder / "one")
    make_run(folder / "two", lr=0.5, score=1.0)
    make_run(folder / "o<b>dd", lr=0.75)
    make_run(folder.parent / "outside")
    command = [sys.executable, "-m", "samestep", "report", "--serve", str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:  # fmt: skip
        line = process.stdout.readline()
        yield folder, re.match(r"(http://127\.0\.0\.1:\d+)/ shows .*runs\. ", line)[1]
        process.terminate()


def ask(address: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as answer:
        return answer.read().decode(errors="replace")


@pytest.mark.program
def test_the_list_and_the_curves_follow_the_runs(served: tuple[Path, str]):
    folder, address = served
    data = json.loads(ask(f"{address}/data"))
    assert {run["name"] for run in data["list"]["runs"]} == {"one", "two", "o<b>dd"}
    assert data["list"]["num"] == 3
    assert (data["comparison"], data["charts"]) == ("", "")
    record.update(folder / "one", record.FAILED, "no space <left>", tags=["first"])
    with (folder / "one/metrics.csv").open("a") as file:
        file.write("3,39,0.125,,,,,\n")
    data = json.loads(ask(f"{address}/data?run=one"))
    (run,) = (run for run in data["list"]["runs"] if run["name"] == "one")
    assert (run["state"], run["tags"]) == ("failed: no space <left>", ["first"])
    assert "&#34;x&#34;: [10, 20, 30, 40]" in data["charts"]
    assert data["comparison"] == ""
    # A run writes its curves more often than its record.
    with (folder / "one/metrics.csv").open("a") as file:
        file.write("4,49,0.125,,,,,\n")
    data = json.loads(ask(f"{address}/data?run=one"))
    assert "&#34;x&#34;: [10, 20, 30, 40, 50]" in data["charts"]


def test_ticked_runs_are_compared(served: tuple[Path, str]):
    data = json.loads(ask(f"{served[1]}/data?run=two&run=o%3Cb%3Edd&run=nothing&run=two"))
    assert '<td class="highest">1.000 <small>highest</small></td>' in data["comparison"]
    assert "o&lt;b&gt;dd - two" in data["comparison"]
    assert "<b>" not in data["comparison"] + data["charts"]
    assert data["charts"].count('aria-label="val/loss"') == 1


def test_the_page_and_the_report_of_a_run_need_no_network(served: tuple[Path, str]):
    _, address = served
    assert re.findall('src="([^"]*)"', ask(address)) == ["plotly.js"]
    report = ask(f"{address}/report/o%3Cb%3Edd")
    assert "<h1>o&lt;b&gt;dd</h1>" in report
    with urllib.request.urlopen(f"{address}/plotly.js") as answer:
        assert answer.headers["Content-Encoding"] == "gzip"


def states_of(folder: Path) -> dict[str, str]:
    """The runs of the list and their states."""
    data = json.loads(live.render_parts(folder, []))
    return {run["name"]: run["state"] for run in data["list"]["runs"]}


def test_only_the_runs_that_have_changed_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("one", "two", "three"):
        make_run(tmp_path / name)
    first = live.render_parts(tmp_path, ["one", "two"])
    read, describe = Mock(side_effect=record.read), Mock(side_effect=overview.describe_runs)
    monkeypatch.setattr(record, "read", read)
    monkeypatch.setattr(overview, "describe_runs", describe)
    assert live.render_parts(tmp_path, ["one", "two"]) == first
    assert (read.call_count, describe.call_count) == (0, 0)
    record.update(tmp_path / "two", record.FAILED, "no space left")
    read.reset_mock()
    assert states_of(tmp_path)["two"] == "failed: no space left"
    read.assert_called_once_with(tmp_path / "two")
    make_run(tmp_path / "four")
    shutil.rmtree(tmp_path / "one")
    assert set(states_of(tmp_path)) == {"two", "three", "four"}


def test_a_killed_run_is_seen_although_no_file_changes(tmp_path: Path):
    record.update(make_run(tmp_path / "one"), record.RUNNING)
    # As the process of a run holds it, until it ends for whatever reason.
    with (tmp_path / "one" / lock.FILE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert states_of(tmp_path) == {"one": "running"}
    assert states_of(tmp_path)["one"].startswith("stopped: killed")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_requests_under_another_name_are_rejected(served: tuple[Path, str], host: str):
    """A website can give its own name the address 127.0.0.1, and read the answer."""
    with pytest.raises(HTTPError, match="403: ask for localhost"):
        ask(f"{served[1]}/data", Host=host)
    port = served[1].rpartition(":")[2]
    assert ask(f"{served[1]}/data", Host=f"localhost:{port}")


@pytest.mark.parametrize("place", ["..%2Foutside", "../outside", "nothing", "", "%00"])
def test_only_runs_of_the_folder_are_sent(served: tuple[Path, str], place: str):
    with pytest.raises(HTTPError, match="404"):
        ask(f"{served[1]}/report/{place}")
    assert json.loads(ask(f"{served[1]}/data?run={place}"))["charts"] == ""


@pytest.mark.parametrize(
    ("port", "why"), [(None, "Address already in use"), (70000, "port must be")]
)
def test_a_port_that_cannot_be_used_is_one_line(served: tuple[Path, str], port, why):
    folder, address = served
    with pytest.raises(ConfigError, match=rf"^--port \d+: .*{why}.*; leave it out for a free one$"):
        live.serve(folder, port or int(address.rpartition(":")[2]))
