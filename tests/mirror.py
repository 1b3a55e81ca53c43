"""Real data files in miniature, in the official formats, and a server for them on loopback."""

import contextlib
import gzip
import hashlib
import io
import pickle
import struct
import tarfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from torchvision import datasets


class MNIST(datasets.MNIST):
    """torchvision's MNIST, with the checksums of a miniature."""

    def __init__(self, archives: Mapping[str, str], **options: Any) -> None:
        self.resources = [*archives.items()]
        super().__init__(**options)


class CIFAR10(datasets.CIFAR10):
    """torchvision's CIFAR-10, with the checksums of a miniature."""

    def __init__(self, archives: Mapping[str, str], **options: Any) -> None:
        files = dict(archives)
        self.tgz_md5 = files.pop(self.filename)
        self.meta = self.meta | {"md5": files.pop("batches.meta")}
        self.test_list = [["test_batch", files.pop("test_batch")]]
        self.train_list = [[*item] for item in files.items()]
        super().__init__(**options)


class Miniature(NamedTuple):
    """A data set whose archives lie in a folder, ready to be served."""

    name: str
    archives: dict[str, str]
    """Name to md5; of CIFAR-10 also of the files in the archive."""
    images: dict[str, np.ndarray]
    """uint8 ``[N, C, H, W]`` of ``train`` and ``test``."""
    labels: dict[str, np.ndarray]
    """int64 ``[N]`` of ``train`` and ``test``."""

    def dataset(self) -> Any:
        """What ``data.dataset`` is in a run with ``overrides``."""
        kind = {"mnist": MNIST, "cifar10": CIFAR10}[self.name]
        return partial(kind, archives=self.archives)

    def overrides(self, root: Path, mirror: str) -> list[str]:
        """What makes a command line read this set, fetched from ``mirror`` into ``root``."""
        target = f"tests.mirror.{self.dataset().func.__name__}"
        entries = ",".join(f"{name}:'{checksum}'" for name, checksum in self.archives.items())
        return [
            f"data={self.name}", f"data.root={root}", f"data.mirror={mirror}",
            f"data.dataset._target_={target}", f"+data.dataset.archives={{{entries}}}",
            "data.num_val=20", "data.global_batch_size=60",
        ]  # fmt: skip


@dataclass
class Server:
    """A web server that can stop in the middle of a file, for good or for a while."""

    url: str = ""
    requests: list[str] = field(default_factory=list)
    """Path of every request, in order."""
    cuts: threading.Semaphore = field(default_factory=partial(threading.Semaphore, 0))
    """As many responses as this was released end after the first half of the file."""
    go_on: threading.Event = field(default_factory=threading.Event)
    """While it is cleared, wait after the first half of each file."""


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """A web server on loopback for the files of ``folder``."""
    server = Server()
    server.go_on.set()

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            server.requests.append(self.path)
            super().do_GET()

        def copyfile(self, source, outputfile) -> None:
            content = source.read()
            half = len(content) // 2
            with contextlib.suppress(ConnectionError):  # a client that was killed
                outputfile.write(content[:half])
                outputfile.flush()
                server.go_on.wait()
                if not server.cuts.acquire(blocking=False):
                    outputfile.write(content[half:])

        def log_message(self, format: str, *args: object) -> None:
            pass

    with (
        ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as http,
        pytest.MonkeyPatch.context() as environment,
    ):
        environment.setenv("no_proxy", "127.0.0.1")
        server.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.go_on.set()
            http.shutdown()
            thread.join()


def mnist(folder: Path, num_train: int = 200, num_test: int = 50) -> Miniature:
    """Write the four archives of MNIST, with few images in them."""
    archives, images, labels = {}, {}, {}
    for part, prefix, number in (("train", "train", num_train), ("test", "t10k", num_test)):
        images[part], labels[part] = _pictures(part, number, (1, 28, 28))
        pixels, answers = images[part].tobytes(), labels[part].astype(np.uint8).tobytes()
        for name, content in (
            (f"{prefix}-images-idx3-ubyte", struct.pack(">4i", 0x803, number, 28, 28) + pixels),
            (f"{prefix}-labels-idx1-ubyte", struct.pack(">2i", 0x801, number) + answers),
        ):
            archives[f"{name}.gz"] = _write(folder / f"{name}.gz", gzip.compress(content, mtime=0))
    return Miniature("mnist", archives, images, labels)


def cifar10(folder: Path, num_train: int = 100, num_test: int = 20) -> Miniature:
    """Write the archive of CIFAR-10, with few images in its five training batches."""
    images, labels = {}, {}
    images["train"], labels["train"] = _pictures("train", num_train, (3, 32, 32))
    images["test"], labels["test"] = _pictures("test", num_test, (3, 32, 32))
    batches = {
        f"data_batch_{i + 1}": python2_pickle(part, answers, f"training batch {i + 1} of 5")
        for i, (part, answers) in enumerate(
            zip(np.split(images["train"], 5), np.split(labels["train"], 5), strict=True)
        )
    }
    batches["test_batch"] = python2_pickle(images["test"], labels["test"], "testing batch 1 of 1")
    batches["batches.meta"] = pickle.dumps({"label_names": [*"abcdefghij"]}, protocol=2)
    archive = tar({f"cifar-10-batches-py/{name}": content for name, content in batches.items()})
    archives = {"cifar-10-python.tar.gz": _write(folder / "cifar-10-python.tar.gz", archive)}
    archives |= {name: md5(content) for name, content in batches.items()}
    return Miniature("cifar10", archives, images, labels)


def python2_pickle(images: np.ndarray, labels: np.ndarray, title: str) -> bytes:
    """A batch of CIFAR-10 as the official files have it, byte strings and old numpy included."""

    def string(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    names = [b"picture_%d.png" % i for i in range(len(labels))]
    dtype = b"cnumpy\ndtype\n" + string(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + string(b"|") + b"NNN" + number(-1) + number(-1) + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + string(b"b")
    array += b"\x87R(K\x01" + number(len(images)) + number(3072) + b"\x86" + dtype
    array += b"\x89" + string(images.tobytes()) + b"tb"
    items = {
        b"batch_label": string(title.encode()),
        b"labels": b"](" + b"".join(number(label) for label in labels) + b"e",
        b"data": array,
        b"filenames": b"](" + b"".join(string(name) for name in names) + b"e",
    }
    return b"\x80\x02}(" + b"".join(string(k) + v for k, v in items.items()) + b"u."


def tar(members: dict[str, bytes]) -> bytes:
    """A ``.tar.gz`` of some files."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as writer:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            writer.addfile(member, io.BytesIO(content))
    return archive.getvalue()


def md5(content: bytes) -> str:
    """The checksum of a file, in hexadecimal."""
    return hashlib.md5(content).hexdigest()


def _write(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return md5(content)


def _pictures(part: str, number: int, shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Noise on which a bright column tells the class, so that a net can learn it."""
    random = np.random.RandomState(len(part))
    images = random.randint(0, 100, (number, *shape)).astype(np.uint8)
    labels = np.arange(number) % 10
    for image, label in zip(images, labels, strict=True):
        image[:, :, 2 * label + 4] = 255
    return images, labels
