import gc
import socket
from pathlib import Path

import pytest

from project.data.download import fetch
from tests import mirror

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
        "timeout_s": 20.0,
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
