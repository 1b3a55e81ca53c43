"""Files of torchvision's data sets, in miniature, from a server on loopback."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from project.data import Images
from samestep import RunError, download, download_once
from tests import mirror
from tests.conftest import ROOT, run


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A folder with the archives of a miniature MNIST, and what describes them."""
    folder = tmp_path_factory.mktemp("served")
    return folder, mirror.mnist(folder)


@pytest.fixture
def server(served):
    with mirror.serve(served[0]) as server:
        yield server


def fetch(root: Path, served, url: str | None, **options: bool) -> None:
    download_once(served[1].dataset(), str(root), **{"download": True, "mirror": url, **options})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files_are_downloaded_once_and_then_need_no_network(tmp_path: Path, served, server):
    fetch(tmp_path / "data", served, f"{server.url}/")
    assert names(tmp_path / "data") == [".lock", "MNIST"]
    assert {*server.requests} == {f"/{name}" for name in served[1].archives}
    num_requests = len(server.requests)
    fetch(tmp_path / "data", served, server.url)
    fetch(tmp_path / "data", served, None, download=False)
    assert len(server.requests) == num_requests
    assert socket.getdefaulttimeout() is None


def test_a_file_that_is_cut_off_is_downloaded_again(tmp_path: Path, served, server):
    fetch(tmp_path, served, server.url)
    for name in ("train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        path = tmp_path / "MNIST/raw" / name
        whole = path.read_bytes()
        for half in (b"", whole[:-1]):
            path.write_bytes(half)
            with pytest.raises(RunError, match=r"data\.root=.*data\.download=false"):
                fetch(tmp_path, served, None, download=False)
            fetch(tmp_path, served, server.url)
            assert path.read_bytes() == whole


def test_a_filled_folder_is_a_server_for_others(tmp_path: Path, served, server):
    fetch(tmp_path / "filled", served, server.url)
    with mirror.serve(tmp_path / "filled/MNIST/raw") as team:
        fetch(tmp_path / "copy", served, team.url)
    assert names(tmp_path / "copy/MNIST/raw") == names(tmp_path / "filled/MNIST/raw")


@pytest.mark.parametrize("kind", ["mnist", "cifar10"])
def test_the_images_are_those_of_the_files(tmp_path: Path, kind: str):
    (tmp_path / "served").mkdir()
    small = getattr(mirror, kind)(tmp_path / "served")
    with mirror.serve(tmp_path / "served") as server:
        download_once(small.dataset(), str(tmp_path), download=True, mirror=server.url)
    found = small.dataset()(root=str(tmp_path), train=True, download=False)
    part = Images.take(type("Data", (), {"trainer": None})(), found, slice(None))
    assert (part.tensors[0].numpy() == small.images["train"]).all()
    assert (part.tensors[1].numpy() == small.labels["train"]).all()


def test_wrong_or_half_files_are_not_kept(tmp_path: Path, served, server):
    server.cuts.release(2)  # torchvision first asks where a redirection leads
    with pytest.raises(download.DownloadError, match=r"cannot download: .*nothing was kept"):
        fetch(tmp_path / "cut", served, server.url)
    assert names(tmp_path / "cut") == [".lock"]
    small = mirror.mnist(tmp_path / "wrong")
    name = "t10k-images-idx3-ubyte.gz"
    (tmp_path / "wrong" / name).write_bytes(b"other")
    with mirror.serve(tmp_path / "wrong") as wrong, pytest.raises(RunError, match=name):
        download_once(small.dataset(), str(tmp_path / "a"), download=True, mirror=wrong.url)
    assert names(tmp_path / "a") == [".lock"]


def test_an_archive_with_paths_outside_its_folder_is_not_opened(tmp_path: Path):
    """It has another checksum than torchvision knows, whatever the configuration says."""
    (tmp_path / "served").mkdir()
    small = mirror.cifar10(tmp_path / "served")
    (archive,) = (tmp_path / "served").iterdir()
    archive.write_bytes(mirror.tar({"../../evil": b"evil", "/tmp/samestep-evil": b"evil"}))
    with mirror.serve(tmp_path / "served") as server, pytest.raises(RunError, match="corrupted"):
        download_once(small.dataset(), str(tmp_path / "data"), download=True, mirror=server.url)
    assert not [*tmp_path.rglob("*evil*")]
    assert not Path("/tmp/samestep-evil").exists()


def test_a_silent_server_is_given_up(tmp_path: Path, served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(download, "SILENCE_S", 0.1)
    silent = socket.create_server(("127.0.0.1", 0))  # accepts, and never answers
    with silent, pytest.raises(RunError, match="timed out"):
        fetch(tmp_path, served, f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert socket.getdefaulttimeout() is None


def test_without_download_missing_files_are_an_error_with_its_remedy(tmp_path: Path, served):
    with pytest.raises(RunError, match=r"Dataset not found.*data\.download=false.*prepare_data"):
        fetch(tmp_path / "data", served, None, download=False)
    assert not (tmp_path / "data").exists()


def test_a_password_of_a_mirror_is_refused_and_not_printed(tmp_path: Path, served):
    with pytest.raises(RunError, match=r"http://\*\*\*@host/data: has a login") as error:
        fetch(tmp_path, served, "http://me:sesame99@host/data")
    assert "sesame99" not in str(error.value)


@pytest.mark.program
def test_a_failed_download_may_be_tried_again(tmp_path: Path):
    """Exit code 1, not 2: the server may answer the next time."""
    words = ["data=mnist", f"data.root={tmp_path}/data", f"run_root={tmp_path}/runs"]
    result = run("train.py", *words, "data.mirror=http://127.0.0.1:9")
    assert result.returncode == 1, result.stderr
    assert "error: cannot download: " in result.stderr
    assert "Connection refused" in result.stderr
    assert not (tmp_path / "runs").exists()


PROCESS = """
import sys
from samestep import download_once
from tests import mirror
from functools import partial
set_ = partial(mirror.MNIST, archives=eval(sys.argv[2]))
download_once(set_, "data", download=True, mirror=sys.argv[1])
"""


@pytest.mark.program
def test_a_killed_process_leaves_nothing_to_trust_and_another_takes_over(
    tmp_path: Path, served, server
):
    server.go_on.clear()
    command = [sys.executable, "-c", PROCESS, server.url, repr(served[1].archives)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'library/src'}:{ROOT}"}
    first = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob("data/.download-*/MNIST/raw/*")):
        assert first.poll() is None
        time.sleep(0.01)
    second = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    assert second.stderr is not None
    assert second.stderr.readline().startswith("downloading into data, or waiting for")
    assert not (tmp_path / "data/MNIST").exists()
    first.send_signal(signal.SIGKILL)
    first.wait()
    server.go_on.set()
    assert second.wait() == 0, second.stderr.read()
    second.stderr.close()
    assert {path.name for path in (tmp_path / "data").iterdir()} == {".lock", "MNIST"}
