"""A real etcd on this machine. Like a pod of a Deployment it comes back, empty, when it is lost."""

import importlib.util
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from library.tests.programs import free_port


def why_not() -> str:
    """What this machine lacks for etcd; nothing if it can be started."""
    if importlib.util.find_spec("etcd") is None:
        return "pip install project[elastic]"
    return "" if shutil.which("etcd") else "apt-get install etcd-server"


class EtcdServer:
    """An etcd with the API that torch uses, which has not been started yet.

    Args:
        directory: where its process number is written, in ``etcd.pid``, for a saboteur.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port, self.peer_port = free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, data: Path) -> None:
        """Start it and wait until it listens."""
        url = f"http://{self.address}"
        self.process = subprocess.Popen(
            [
                "etcd", "--enable-v2", f"--data-dir={data}", f"--listen-client-urls={url}",
                f"--advertise-client-urls={url}",
                f"--listen-peer-urls=http://127.0.0.1:{self.peer_port}",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "etcd.pid").write_text(str(self.process.pid))
        while self.process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.1)

    def kill(self) -> None:
        """End it as if its machine was lost."""
        if self.process:
            self.process.kill()
            self.process.wait()

    def is_back_at(self) -> float:
        """Before when no replacement may start."""
        path = self.directory / "etcd.away"
        return float(path.read_text() or 0) if path.exists() else 0

    def bring_back(self) -> None:
        """Let the replacement start now."""
        (self.directory / "etcd.away").write_text("0")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start it, and start an empty one in its place whenever it ends."""
        is_over = threading.Event()

        def replace_it(data: str) -> None:
            for number in itertools.count(1):
                self.process.wait()
                while time.time() < self.is_back_at() and not is_over.is_set():
                    time.sleep(0.1)
                if is_over.is_set():
                    return
                self.start(Path(data, str(number)))

        with tempfile.TemporaryDirectory() as data:
            self.start(Path(data, "0"))
            thread = threading.Thread(target=replace_it, args=(data,))
            thread.start()
            try:
                yield
            finally:
                is_over.set()
                while thread.is_alive():  # it may be starting another one
                    self.kill()
                    thread.join(0.1)


def lose(directory: Path, away_s: float) -> None:
    """End the running etcd of this directory, and keep its replacement away for some seconds."""
    (directory / "etcd.away").write_text(str(time.time() + away_s))
    pid = int((directory / "etcd.pid").read_text())
    os.kill(pid, signal.SIGKILL)
