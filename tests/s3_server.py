"""A real S3 server on loopback, moto's, and a proxy before it that does harm."""

import http.client
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from library.tests.programs import environment, free_port, until

KEY = "AKIA" + "F4K3" * 4
SECRET = "sesame-open-456"


@contextmanager
def s3_server(log: Path) -> Iterator[dict[str, str]]:
    """The environment in which ``s3://...`` is a server on loopback."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment())
        try:
            until(lambda: _answers(port))
            yield variables_of(port)
        finally:
            server.kill()
            server.wait()


def use_bucket(
    server: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> fsspec.AbstractFileSystem:
    """Have this process use the server, with a bucket of this name; returns its file system."""
    for key, value in server.items():
        monkeypatch.setenv(key, value)
    fs = fsspec.filesystem("s3", skip_instance_cache=True)
    if not fs.exists(name):
        fs.mkdir(name)
    return fs


def variables_of(port: int) -> dict[str, str]:
    """The environment in which ``s3://...`` is the server at this port."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_DEFAULT_REGION": "us-east-1",
        "no_proxy": "127.0.0.1",
    }


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def harm(
    server: dict[str, str], fault: Callable[[str, str], int | Callable[[bytes], bytes] | None]
) -> Iterator[dict[str, str]]:
    """A proxy before ``server``, and the environment in which ``s3://...`` is this proxy.

    ``fault`` is called with method and path of each request. It may wait, and it may return the
    status to answer instead of the server, -1 to close the connection, or a function that changes
    what the server gives.
    """
    address = server["AWS_ENDPOINT_URL"].removeprefix("http://")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status = fault(self.command, self.path)
            if status == -1:
                self.close_connection = True
                return
            if isinstance(status, int) and status:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            connection = http.client.HTTPConnection(address)
            try:
                connection.request(self.command, self.path, content, dict(self.headers))
                answer = connection.getresponse()
                body = answer.read()
            except (OSError, http.client.HTTPException):  # the server was stopped meanwhile
                self.close_connection = True
                return
            body = status(body) if callable(status) else body
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            self.end_headers()
            with suppress(BrokenPipeError):  # a client that waits no longer
                self.wfile.write(body)
            connection.close()

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

        def log_message(self, *_: object) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield variables_of(proxy.server_address[1])
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
