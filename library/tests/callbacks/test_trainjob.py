"""Reports to Kubeflow Trainer, here to a server of the test; the real one: tests/labs/servers."""

import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import lightning as L
import pytest

from library.tests.kit import fit
from samestep.callbacks import trainjob
from samestep.callbacks.trainjob import TrainJobProgress

SECRET = "eyJhbGciOiJSUzI1NiJ9"
pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl")


class StatusServer(ThreadingHTTPServer):
    """Keeps what it gets, and gives the same answer to everything."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = 200
        self.answers = threading.Event()
        self.answers.set()
        self.got: list[tuple[str, str, dict]] = []  # path, token, report


class Handler(BaseHTTPRequestHandler):
    server: StatusServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        token = self.headers["Authorization"]
        self.server.got.append((self.path, token, json.loads(body)["trainerStatus"]))
        self.server.answers.wait()
        self.send_response(self.server.answer)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Requests are not logged."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StatusServer]:
    certificate, key, token = (tmp_path / name for name in ("ca.crt", "tls.key", "token"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out",
         certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    token.write_text(f"{SECRET}\n")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with StatusServer() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"https://127.0.0.1:{server.server_port}/trainjobs/mine/status"
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", url)
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(certificate))
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(token))
        # As if each step took ten seconds, and the server answered at once.
        monkeypatch.setattr(trainjob, "EVERY_S", 0)
        yield server
        server.shutdown()


def with_reports() -> list[L.Callback]:
    return [TrainJobProgress()]


@pytest.mark.program
def test_a_trainjob_shows_progress_and_metrics(server: StatusServer, tmp_path: Path):
    fit(tmp_path / "run", places=[(1, 1)], callbacks=with_reports)  # stopped and resumed
    paths, tokens, reports = zip(*server.got, strict=True)
    assert set(paths) == {"/trainjobs/mine/status"}
    assert set(tokens) == {f"Bearer {SECRET}"}
    percent = [report["progressPercentage"] for report in reports]
    assert percent == sorted(percent)
    assert (percent[0], percent[-1]) == (12, 100)  # after the first of eight steps, and the last
    assert reports[-1]["estimatedRemainingSeconds"] == 0
    shown = {metric["name"]: metric["value"] for metric in reports[-1]["metrics"]}
    assert (shown["epoch"], shown["step"]) == ("2", "8")
    assert {"train_loss", "val_loss"} <= shown.keys()
    assert all(isinstance(value, str) for value in shown.values())
    assert reports[-1]["lastUpdatedTime"].endswith("+00:00")


def test_outside_of_a_trainjob_nothing_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sent: list[dict] = []
    monkeypatch.setattr(trainjob, "post", sent.append)
    fit(tmp_path / "run", callbacks=with_reports, max_epochs=1)
    assert sent == []


@pytest.mark.program
def test_a_server_that_fails_is_named_once_and_harms_nothing(
    server: StatusServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    server.answer = 403
    fit(tmp_path / "rejected", callbacks=with_reports)
    said = capsys.readouterr().out
    assert said.count("Note: the TrainJob does not show the progress of the run: its") == 1
    assert "answers 403 Forbidden" in said
    (tmp_path / "token").write_text(f"{SECRET}\n{SECRET}")  # no value of a header
    fit(tmp_path / "damaged", callbacks=with_reports)
    said = capsys.readouterr().out
    assert "of the run: ValueError" in said
    assert SECRET not in said
    server.shutdown()
    server.socket.close()
    (tmp_path / "token").write_text(SECRET)
    fit(tmp_path / "gone", callbacks=with_reports)
    assert "Connection refused" in capsys.readouterr().out


@pytest.mark.program
def test_a_run_ends_before_a_server_that_does_not_answer(
    server: StatusServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr(trainjob, "TIMEOUT_S", 0.3)
    server.answers.clear()
    fit(tmp_path / "run", callbacks=with_reports)
    assert "of the run: The read operation timed out" in capsys.readouterr().out
    assert not server.answers.is_set()
    server.answers.set()


@pytest.mark.program
def test_a_server_with_another_certificate_does_not_get_the_token(
    server: StatusServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_CA_CERT")
    fit(tmp_path / "run", callbacks=with_reports, max_epochs=1)
    assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().out
    assert server.got == []
