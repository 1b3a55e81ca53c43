"""Notices that a machine will be taken away, from stand-ins on this one."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import lightning as L
import pytest

from library.tests.kit import Net, batches, fit, on_ranks
from library.tests.programs import PATIENCE_S, until
from samestep import Trainer
from samestep.errors import ConfigError
from samestep.plugins import notices
from samestep.ranks import environment, stopping
from samestep.run import manifest


class Metadata(BaseHTTPRequestHandler):
    """What AWS and Google answer on an instance, as far as they are asked."""

    is_taken = False
    token = "first"

    def do_PUT(self) -> None:
        is_valid = self.headers["X-aws-ec2-metadata-token-ttl-seconds"] == str(notices.TOKEN_S)
        is_asked = self.path == "/latest/api/token" and is_valid
        self._answer(200 if is_asked else 400, type(self).token)

    def do_GET(self) -> None:
        if self.path == "/computeMetadata/v1/instance/preempted":
            has_header = self.headers["Metadata-Flavor"] == "Google"
            self._answer(200 if has_header else 403, "TRUE" if self.is_taken else "FALSE")
        elif self.headers["X-aws-ec2-metadata-token"] != type(self).token:
            self._answer(401, "")
        elif self.path == "/latest/meta-data/spot/instance-action" and self.is_taken:
            self._answer(200, json.dumps({"action": "terminate", "time": "2026-11-27T08:22:00Z"}))
        else:
            self._answer(404, "")

    def _answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Nothing: pytest shows the standard error of a failed test."""


@contextmanager
def metadata_server() -> Iterator[tuple[str, type[Metadata]]]:
    """The address of a stand-in, and the class that says what it answers."""

    class Own(Metadata):
        pass

    server = HTTPServer(("127.0.0.1", 0), Own)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}", Own
    finally:
        server.shutdown()
        server.server_close()


def test_aws_is_asked_with_a_token_that_may_expire(monkeypatch: pytest.MonkeyPatch):
    with metadata_server() as (address, answers):
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{address}/")
        # A proxy would answer for another machine.
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        ask = notices.source_of("aws")
        assert ask is not None
        assert ask() is None
        answers.token = "second"
        answers.is_taken = True
        assert ask() is None
        assert ask() == "AWS will terminate this instance at 2026-11-27T08:22:00Z"


def test_google_is_asked_with_its_header(monkeypatch: pytest.MonkeyPatch):
    with metadata_server() as (address, answers):
        monkeypatch.setenv("GCE_METADATA_HOST", address)
        ask = notices.source_of("gcp")
        assert ask is not None
        assert ask() is None
        answers.is_taken = True
        assert ask() == "Google will preempt this machine"


def test_a_file_that_appears_is_a_notice(tmp_path):
    path = tmp_path / "notice"
    ask = notices.source_of(f"file:{path}")
    assert ask is not None
    assert ask() is None
    path.write_text("soon")
    assert ask() == "soon"


@pytest.mark.parametrize("notice", ["azure", "file:", "/notices/spot"])
def test_an_unknown_source_is_rejected(tmp_path, notice):
    with pytest.raises(ConfigError, match=f"notice={notice}: must be file:PATH, aws, gcp"):
        notices.source_of(notice)
    with pytest.raises(ConfigError, match=f"notice={notice}: must be"):
        Trainer(run_dir=tmp_path / "run", notice=notice)
    assert not (tmp_path / "run").exists()


def test_each_new_notice_asks_once(monkeypatch, capfd):
    """A source that fails is named once, and asked again."""
    answers = iter([OSError("away"), OSError("away"), "soon", "soon", None, "again", "again"])
    num_asked = num_saved = 0
    is_over = threading.Event()

    def ask() -> str | None:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 9:
            is_over.set()
        answer = next(answers, "again")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def count() -> None:
        nonlocal num_saved
        num_saved += 1

    monkeypatch.setattr(notices, "EVERY_S", 0)
    monkeypatch.setattr(stopping, "ask_to_save", count)
    watch = notices.Notices(ask)
    watch.on_fit_start(None, None)  # type: ignore[arg-type]
    assert is_over.wait(PATIENCE_S)
    watch.on_fit_end()
    assert num_saved == 2
    said = capfd.readouterr().out
    assert said.count("Note: notice has no answer, and is tried again: away") == 1
    assert said.count("Notice for node 0: soon") == said.count("Notice for node 0: again") == 1


class CountsSaves(L.Callback):
    """Counts the saves after the first step and before the end of the epoch."""

    num_saves = 0

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.num_saves += 0 < trainer.global_step < 80


is_taken = threading.Event()


class Taken(Net):
    """In its sixth of 80 steps the machine is taken away, and its rank waits for the notice."""

    def training_step(self, batch, batch_idx):
        if self.global_step == 5 and environment.local_rank() == 0:
            is_taken.set()
            until(lambda: stopping._State.is_asked)
        return super().training_step(batch, batch_idx)


def train_with_notice(run_dir: str) -> None:
    notices.EVERY_S = 0
    counts = CountsSaves()

    def ask() -> str | None:
        assert environment.local_rank() == 0
        return "soon" if is_taken.wait(0.01) else None

    options = {"max_epochs": 1, "save_every_s": 1e9, "notice": ask}
    fit(Path(run_dir), Taken, lambda: batches(320), callbacks=lambda: [counts], **options)
    print(f"rank {environment.rank()} has saved {counts.num_saves} time")


@pytest.mark.program
def test_all_ranks_save_at_the_notice_of_one_and_go_on(tmp_path):
    done = on_ranks(train_with_notice, str(tmp_path / "mine"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Notice for node 0: soon") == 1
    assert "as was asked." in done.stdout
    for rank in (0, 1):
        assert f"rank {rank} has saved 1 time" in done.stdout
    last = manifest.read(tmp_path / "mine/checkpoints/last.ckpt")
    assert last is not None
    assert last.global_step == 80
