import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from library.tests.programs import PATIENCE_S
from project.data.download import DataError, fetch
from tests import mirror
from tests.conftest import run

# Pooch leaves the connection of a download that failed to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in. <socket")


@pytest.fixture(autouse=True)
def closed_connections():
    """Collect the garbage of a test before the next one, which does not expect that warning."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A folder with the files of a miniature MNIST, and what describes them."""
    folder = tmp_path_factory.mktemp("served")
    return folder, mirror.mnist(folder)


@pytest.fixture
def server(served):
    with mirror.serve(served[0]) as server:
        yield server


@pytest.fixture
def arguments(served, server):
    """Arguments of ``fetch`` that get the miniature MNIST."""
    _, mnist = served
    return {
        "url": "http://127.0.0.1:9/nobody",
        "archives": mnist.archives,
        "files": mnist.files,
        "mirror": server.url,
        "download": True,
        "name": "mnist",
        "timeout_s": PATIENCE_S,
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_downloads_once_and_then_needs_no_network(tmp_path, served, server, arguments, capfd):
    _, mnist = served
    root = tmp_path / "data" / "mnist"
    fetch(root, **arguments)
    assert names(root) == sorted([".lock", *mnist.archives, *mnist.files])
    assert {name: mirror.md5((root / name).read_bytes()) for name in mnist.files} == mnist.files
    assert sorted(server.requests) == sorted(f"/{name}" for name in mnist.archives)
    output = capfd.readouterr().err  # no progress bar outside a terminal
    assert output.splitlines() == [f"downloading {server.url}/{name}" for name in mnist.archives]

    fetch(root, **arguments)
    fetch(root, **{**arguments, "download": False})
    assert len(server.requests) == len(mnist.archives)
    assert socket.getdefaulttimeout() is None


def test_only_what_is_damaged_is_downloaded_again(tmp_path, server, arguments):
    fetch(tmp_path, **arguments)
    whole = (tmp_path / "t10k-images-idx3-ubyte").read_bytes()
    del server.requests[:]

    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    fetch(tmp_path, **arguments)
    assert (tmp_path / "t10k-images-idx3-ubyte").read_bytes() == whole
    assert server.requests == []  # from the archive that was kept

    (tmp_path / "t10k-images-idx3-ubyte").unlink()
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(b"rotten")
    fetch(tmp_path, **arguments)
    assert (tmp_path / "t10k-images-idx3-ubyte").read_bytes() == whole
    assert set(server.requests) == {"/t10k-images-idx3-ubyte.gz"}


SRC = Path(__file__).parents[3] / "src"


def test_a_filled_folder_is_a_mirror(tmp_path, arguments):
    fetch(tmp_path / "filled", **arguments)
    with mirror.serve(tmp_path / "filled") as team:
        fetch(tmp_path / "copy", **{**arguments, "mirror": f"{team.url}/"})
    assert names(tmp_path / "copy") == names(tmp_path / "filled")


def test_wrong_bytes_from_the_server_are_not_kept(tmp_path, arguments):
    served = tmp_path / "served"
    mnist = mirror.mnist(served)
    name = "train-images-idx3-ubyte.gz"
    content = bytearray((served / name).read_bytes())
    content[100] ^= 1
    (served / name).write_bytes(content)
    with mirror.serve(served) as server, pytest.raises(DataError) as error:
        fetch(tmp_path / "mnist", **{**arguments, "mirror": server.url})
    assert f"{server.url}/{name}" in str(error.value)
    assert f"expected md5:{mnist.archives[name]} but got {mirror.md5(content)}" in str(error.value)
    assert names(tmp_path / "mnist") == [".lock"]


def test_truncated_download_is_not_kept(tmp_path, server, arguments):
    server.cuts.release(1)
    with pytest.raises(DataError, match=r"IncompleteRead.* nothing was kept"):
        fetch(tmp_path, **arguments)
    assert names(tmp_path) == [".lock"]
    fetch(tmp_path, **arguments)


def test_silent_server_is_given_up(tmp_path, arguments):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz: timed out"):
            fetch(tmp_path, **{**arguments, "mirror": url, "timeout_s": 0.1})
    assert names(tmp_path) == [".lock"]
    assert socket.getdefaulttimeout() is None


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        (None, "Connection refused"),  # url, where nobody listens, since there is no mirror
        ("{url}/elsewhere", "404 Client Error"),
        ("not an address", "Failed to parse"),
    ],
)
def test_unreachable_address_is_named(tmp_path, server, arguments, address, reason):
    wanted = address.format(url=server.url) if address else arguments["url"]
    with pytest.raises(
        DataError, match=rf"cannot download {wanted}/train-images.*{reason}.*mirror"
    ):
        fetch(tmp_path, **{**arguments, "mirror": wanted if address else None})
    assert len(server.requests) <= 1


@pytest.mark.program
def test_a_failed_download_may_be_tried_again(tmp_path: Path):
    """Exit code 1, not 2: the server may answer the next time."""
    words = ["data=mnist", f"data.root={tmp_path}/data", f"run_root={tmp_path}/runs"]
    result = run("train.py", *words, "data.mirror=http://127.0.0.1:9")
    assert result.returncode == 1
    assert "error: cannot download http://127.0.0.1:9" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_place_that_cannot_be_written(tmp_path, arguments):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(DataError, match=r"cannot use .*/file/mnist for data set mnist: .*file"):
        fetch(tmp_path / "file" / "mnist", **arguments)


def test_archive_without_the_expected_files(tmp_path, arguments):
    wrong = {**arguments["files"], "train-labels-idx1-ubyte": "0" * 32}
    with pytest.raises(DataError, match=r"do not hold .*train-labels.* expected 0{32}"):
        fetch(tmp_path, **{**arguments, "files": wrong})
    assert not (tmp_path / "train-labels-idx1-ubyte").exists()


START_THREE = """
import json, os, pathlib, sys
from project.data.download import fetch  # imported once
for number in range(3):
    pid = os.fork()
    if not pid:
        os.dup2(os.open(f"{number}.log", os.O_CREAT | os.O_WRONLY), 2)
        fetch(pathlib.Path("mnist"), **json.loads(sys.argv[1]))
        os._exit(0)
    print(pid, flush=True)
for number in range(3):
    print(os.wait()[1], flush=True)
"""


@pytest.mark.program
def test_killed_process_leaves_nothing_to_trust_and_the_others_fetch_once(
    tmp_path, served, server, arguments
):
    """Three processes: one is killed while it downloads, one of those that wait takes over."""

    def first_line(number: int) -> str:
        while "\n" not in (text := logs[number].read_text() if logs[number].exists() else ""):
            assert processes.poll() is None
            time.sleep(0.01)
        return text.partition("\n")[0]

    server.go_on.clear()
    logs = [tmp_path / f"{number}.log" for number in range(3)]
    root = tmp_path / "mnist"
    with (
        subprocess.Popen(
            [sys.executable, "-c", START_THREE, json.dumps(arguments)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(SRC)},
            stdout=subprocess.PIPE,
            text=True,
        ) as processes,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(server.go_on.set)
        pids = [int(processes.stdout.readline()) for _ in range(3)]
        lines = {first_line(number).split()[0]: pids[number] for number in range(3)}
        assert sorted(first_line(number).split()[0] for number in range(3)) == [
            "downloading",
            "waiting",
            "waiting",
        ]
        # The file is made a moment before the request is sent.
        while not (server.requests and list(root.glob(".download-*/tmp*"))):
            time.sleep(0.01)
        os.kill(lines["downloading"], signal.SIGKILL)
        assert processes.stdout.readline() == f"{signal.SIGKILL:d}\n"
        assert not list(root.glob("*ubyte*"))
        server.go_on.set()
        assert processes.communicate()[0] == "0\n0\n", [log.read_text() for log in logs]
    archives = list(served[1].archives)
    for name in archives:
        killed = name == archives[0]
        assert server.requests.count(f"/{name}") == 1 + killed
    assert names(root) == sorted([".lock", *archives, *served[1].files])


@pytest.mark.parametrize(
    "mirror_url",
    [
        "http://user:sesame99@127.0.0.1:1",
        "ftp://user:sesame99@127.0.0.1:1",
        "http://user:sesame99@[::1",
    ],
)
def test_the_password_of_a_mirror_is_never_printed(tmp_path, arguments, capfd, mirror_url):
    with pytest.raises(DataError, match=r"cannot download \w+://\*\*\*@") as error:
        fetch(tmp_path, **{**arguments, "mirror": mirror_url})
    output = capfd.readouterr()
    assert "downloading " in output.err
    for text in (str(error.value), output.out, output.err):
        assert "sesame99" not in text


def test_a_mirror_with_a_login(tmp_path, server, arguments, capfd):
    address = server.url.replace("http://", "http://user:sesame99@")
    fetch(tmp_path, **{**arguments, "mirror": address})
    assert len(server.requests) == len(arguments["archives"])
    assert "http://***@127.0.0.1" in (printed := "".join(capfd.readouterr()))
    assert "sesame99" not in printed


@pytest.mark.parametrize("name", ["/etc/cron.d/evil", "../.bashrc", "a/../../.ssh/authorized_keys"])
@pytest.mark.parametrize("kind", ["archives", "files"])
def test_no_file_is_written_outside_of_the_folder(tmp_path, arguments, name, kind):
    root = tmp_path / "data" / "mnist"
    with pytest.raises(DataError, match=r"must lie below data.root"):
        fetch(root, **{**arguments, kind: {name: "0" * 32}})
    assert not root.exists()


def test_without_download_a_fault_is_an_error_with_its_remedy(tmp_path, served, server, arguments):
    root = tmp_path / "my data" / "mnist"
    remedy = rf"python scripts/prepare_data.py data=mnist 'data.root={tmp_path}/my data'"
    with pytest.raises(DataError) as missing:
        fetch(root, **{**arguments, "download": False})
    assert f"{root}/train-images-idx3-ubyte is missing" in str(missing.value)
    assert "`samestep launch cluster=k8s data=mnist --data`" in str(missing.value)
    assert str(missing.value).endswith(remedy)
    assert not root.exists()

    fetch(root, **arguments)
    del server.requests[:]
    (root / "train-labels-idx1-ubyte").write_bytes(b"rotten")
    with pytest.raises(DataError) as damaged:
        fetch(root, **{**arguments, "download": False})
    expected = served[1].files["train-labels-idx1-ubyte"]
    assert f"md5 {mirror.md5(b'rotten')}, expected {expected}" in str(damaged.value)
    assert str(damaged.value).endswith(remedy)
    assert server.requests == []
