"""Trackers against real servers on loopback; each part with W&B runs in a process of its own."""

import csv
import gzip
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from library.tests.kit import Net, batches, fit
from library.tests.programs import run_code, until
from samestep import loggers
from samestep.errors import ConfigError
from samestep.run import record as run_record
from samestep.run.artifacts import Artifacts

KEY = "k3y" * 14
PASSWORD = "hunter2-of-the-server"
SECRET = "sesame-open-123"
LATER = "To upload later: wandb sync"


class Wandb(BaseHTTPRequestHandler):
    """As much of a W&B server as a run needs; it rejects every key if ``rejects`` is set."""

    rejects = False
    received: tuple[str, ...] = ()
    history: tuple[str, ...] = ()  # of the only run, a line for each row

    def do_GET(self):
        self._answer(200, {})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        Wandb.received += (body.decode(errors="replace"),)
        if Wandb.rejects:
            return self._answer(401, {"errors": [{"message": "wrong key"}]})
        request = json.loads(body) if self.path == "/graphql" else {"query": ""}
        if "UpsertBucket" in request["query"]:
            run = {"id": "1", "project": {"name": "p", "entity": {"name": "me"}}}
            run |= {"name": "mine", "displayName": "mine", "config": "{}", "historyLineCount": 0}
            return self._answer(200, {"data": {"upsertBucket": {"bucket": run, "inserted": True}}})
        if "RunResumeStatus" in request["query"] and Wandb.history:
            numbers = {f"{name}LineCount": 0 for name in ("events", "log")}
            run = {"name": "mine", "id": "1", "projectId": "1", "config": "{}", "eventsTail": "[]"}
            # Without "t", W&B would take it for a run that has not begun.
            run |= {"wandbConfig": '{"t": {}}', "historyTail": json.dumps(Wandb.history[-1:])}
            run |= numbers
            run |= {"historyLineCount": len(Wandb.history), "summaryMetrics": Wandb.history[-1]}
            model = {"id": "1", "name": "p", "entity": {"id": "1", "name": "me"}, "bucket": run}
            return self._answer(200, {"data": {"model": model}})
        if "file_stream" in self.path:
            for name, part in (json.loads(body).get("files") or {}).items():
                if "history" in name:
                    Wandb.history = (*Wandb.history[: part["offset"]], *part["content"])
        if "CreateRunFiles" in request["query"]:
            url = f"http://{self.headers['Host']}/files"
            names = request["variables"]["files"]
            files = [{"name": name, "uploadUrl": url} for name in names]
            answer = {"runID": "1", "uploadHeaders": [], "files": files}
            return self._answer(200, {"data": {"createRunFiles": answer}})
        return self._answer(200, {"data": {"model": {"bucket": None}}})

    do_PUT = do_POST

    def _answer(self, code, answer):
        body = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@contextmanager
def serving() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Wandb) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def build(run_dir: Path, **arguments: object) -> loggers.WandbLogger:
    """A W&B logger, and two steps logged."""
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("model: {lr: 0.125}\n")
    arguments = {"project": "p", "entity": None, "group": "g", "tags": ["t"]} | arguments
    logger = loggers.wandb_logger(str(run_dir), "mine", **arguments)
    for step in (0, 1):
        logger.log_metrics({"train/loss": 0.0625 + step}, step=step)
    return logger


def continue_offline(root: str, muted: str) -> None:
    """One process, as in a sweep, that meets every reason to continue offline."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"http://me:{PASSWORD}@127.0.0.1:{server.getsockname()[1]}"
    with serving() as url:
        servers = {"closed": closed, "muted": muted, "keyless": url, "rejected": url}
        for name, base_url in servers.items():
            key = "" if name == "keyless" else KEY
            Wandb.rejects = name == "rejected"
            os.environ.update(WANDB_BASE_URL=base_url, WANDB_API_KEY=key)
            build(Path(root, name))
        os.environ["WANDB_MODE"] = "offline"
        build(Path(root, "asked"))
        with pytest.raises(ConfigError, match="Invalid project name 'a/b'"):
            build(Path(root, "misnamed"), project="a/b")
        os.environ["WANDB_MODE"] = "disabled"
        build(Path(root, "disabled"))


def lose_the_server(root: str) -> None:
    """A run whose server goes away while it trains, and one whose server stops to answer."""
    loggers.FINISH_TIMEOUT_S = 2
    del os.environ["WANDB_MODE"]
    Wandb.rejects, Wandb.received = False, ()
    with serving() as url:
        os.environ.update(WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
        logger = build(Path(root, "online"))
    for step in range(2, 20):
        logger.log_metrics({"train/loss": 0.0625 + step}, step=step)
    logger.finalize("success")
    Path(root, "received.json").write_text(json.dumps(Wandb.received))
    with serving() as url:
        os.environ.update(WANDB_BASE_URL=url)
        logger = build(Path(root, "hung"))
        Wandb.do_GET = Wandb.do_POST = Wandb.do_PUT = lambda self: Event().wait()
        for step in range(2, 500):  # a step that waited would wait for ever
            logger.log_metrics({"train/loss": 0.0625 + step}, step=step)
        logger.finalize("success")
        sys.modules["wandb"].finish()


def offline_run(run_dir: Path) -> str:
    (path,) = run_dir.glob("wandb/offline-run-*-mine/run-mine.wandb")
    return path.read_bytes().decode(errors="replace")


@pytest.mark.program
def test_wandb_continues_offline_with_one_warning_and_gets_no_secret(tmp_path: Path):
    """And a server that goes away or hangs stops nothing."""
    with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts, and never answers
        muted = f"http://127.0.0.1:{mute.getsockname()[1]}"
        code = (
            f"import sys; from {__name__} import *; continue_offline(*sys.argv[1:3]); "
            "print('---', file=sys.stderr, flush=True); lose_the_server(sys.argv[1])"
        )
        secrets = {"FAKE_SECRET": SECRET, "NETRC": str(tmp_path / "netrc")}
        result = run_code(code, str(tmp_path), muted, f"a={SECRET}", **secrets)
    assert result.returncode == 0, result.stderr
    warnings = result.stderr.partition("---")[0].splitlines()
    for name, reason in (
        ("closed", "does not answer: [Errno"),
        ("muted", "does not answer: timed out"),
        ("keyless", "there is no key"),
        ("rejected", "wrong key"),
    ):
        (warning,) = [line for line in warnings if f"{LATER} {tmp_path}/{name}/wandb" in line]
        assert reason in warning
        text = offline_run(tmp_path / name)
        assert "train/loss" in text
        assert "0.0625" in text
    assert len(warnings) == 4, "a wish for offline is respected without a warning"
    assert "train/loss" in offline_run(tmp_path / "asked")
    assert not (tmp_path / "disabled/wandb").exists()
    assert "0.125" in offline_run(tmp_path / "closed")  # the configuration
    for path in tmp_path.rglob("*"):
        if path.is_file():
            text = path.read_bytes()
            assert SECRET.encode() not in text, path
            assert KEY.encode() not in text, path
            assert PASSWORD.encode() not in text, path
    assert not list(tmp_path.rglob("wandb-metadata.json"))
    assert not list(tmp_path.rglob("*.py"))

    assert "W&B: http://127.0.0.1" in result.stdout
    (path,) = tmp_path.glob("online/wandb/run-*-mine/run-mine.wandb")
    assert "19.0625" in path.read_bytes().decode(errors="replace")
    (path,) = tmp_path.glob("hung/wandb/run-*-mine/run-mine.wandb")
    assert "499.0625" in path.read_bytes().decode(errors="replace")  # for `wandb sync`

    received = (tmp_path / "received.json").read_text()
    assert SECRET not in received
    assert KEY not in received
    queries = [json.loads(body) for body in json.loads(received) if body.startswith('{"query')]
    (resume,) = [q["variables"] for q in queries if "RunResumeStatus" in q["query"]]
    assert (resume["project"], resume["name"]) == ("p", "mine")  # continued where it exists
    start = next(q["variables"] for q in queries if "UpsertBucket" in q["query"])
    assert (start["name"], start["displayName"], start["groupName"]) == ("mine", "mine", "g")
    assert json.loads(start["config"])["model"]["value"] == {"lr": 0.125}
    assert start["commit"] is start["repo"] is None


def wait_for_the_next_second() -> None:
    second = int(time.time())
    until(lambda: int(time.time()) > second)


def log_offline(run_dir: str) -> None:
    """Start a run twice. Before each, one was killed at once: with its empty file, ``wandb sync``
    would stop."""
    for steps in (range(5), range(5, 9)):
        killed = Path(run_dir, "wandb/offline-run-20260101_000000-mine/run-mine.wandb")
        killed.parent.mkdir(parents=True)
        killed.touch()
        Path(run_dir, "config.yaml").write_text("model: {lr: 0.125}\n")
        logger = loggers.wandb_logger(run_dir, "mine", "p", None, None, [])
        for step in steps:
            logger.log_metrics({"train/loss": 0.0625 + step}, step=step)
        sys.modules["wandb"].finish()
        # The folder of the next start is named after its second.
        wait_for_the_next_second()


@pytest.mark.program
def test_the_offline_starts_of_a_run_sync_as_one_run(tmp_path: Path):
    code = f"import sys; from {__name__} import *; log_offline(*sys.argv[1:])"
    done = run_code(code, str(tmp_path / "mine"), WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    folders = sorted(map(str, tmp_path.glob("mine/wandb/offline-run-*")))
    assert len(folders) == 2
    Wandb.history = ()
    with serving() as url:
        sync = "from wandb.cli.cli import cli; cli()"
        variables = {"WANDB_BASE_URL": url, "WANDB_API_KEY": KEY}
        done = run_code(sync, "sync", *folders, **variables, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(row) for row in Wandb.history]
    assert [row["train/loss"] for row in rows] == [0.0625 + step for step in range(9)]
    assert [row["trainer/global_step"] for row in rows] == list(range(9))


@pytest.fixture
def no_mlflow_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)


def test_an_mlflow_server_that_does_not_answer_is_named(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"http://127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(ConfigError, match=f"{closed} does not answer"):
        loggers.mlflow_logger(str(tmp_path), "mine", "digits", closed)


@pytest.mark.program
@pytest.mark.usefixtures("no_mlflow_variables")
def test_mlflow_shows_what_has_changed_and_not_another_run(tmp_path: Path, monkeypatch):
    """The name is used again before and after a checkpoint, with another configuration."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlflow").as_uri()

    def start(rate: float, run_dir: str, step: int | None) -> Any:
        Path(tmp_path, run_dir).mkdir(exist_ok=True)
        Path(tmp_path, run_dir, "config.yaml").write_text(f"model: {{lr: {rate}}}\n")
        starts = [{"started": run_dir}]
        run_record.update(
            tmp_path / run_dir, run_record.RUNNING, run_id="mine", step=step, starts=starts
        )
        logger = loggers.mlflow_logger(str(tmp_path / run_dir), "mine", "digits", uri)
        logger.log_metrics({"loss": rate}, step=1)
        logger.log_metrics({"loss": rate}, step=1)  # is not checked within a process
        return MlflowClient(uri).get_run(logger.run_id)

    first = start(0.1, "one", None)
    assert start(0.1, "one", None).info.run_id == first.info.run_id
    second = start(0.2, "one", None)
    assert second.info.run_id != first.info.run_id
    third = start(0.3, "one", 10)
    assert third.info.run_id == second.info.run_id
    assert (third.data.params["model/lr"], third.data.tags["changed/model/lr"]) == ("0.2", "0.3")
    history = MlflowClient(uri).get_metric_history(third.info.run_id, "loss")
    assert {metric.value for metric in history} == {0.2, 0.3}
    assert start(0.3, "two", None).info.run_id not in {first.info.run_id, second.info.run_id}


def test_a_missing_package_is_one_message_with_its_command(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"a package is missing: pip install no-such$"):
        loggers.require("no_such", "no-such")


class WithTest(Net):
    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))


def track(root: str) -> None:
    """A run with all trackers, each of which writes its own files: four steps, two are logged."""
    for name in ("other", "mine"):  # as in a sweep, each has its own
        run_dir = str(Path(root, name))
        Path(run_dir).mkdir()
        Path(run_dir, "config.yaml").write_text("model: {lr: 0.125}\n")
        mlflow = loggers.mlflow_logger(run_dir, name, "project", None)
    trackers = [
        TensorBoardLogger(run_dir, name="tensorboard", version=""),
        loggers.wandb_logger(run_dir, "mine", "p", None, None, []),
        mlflow,
    ]
    (part,) = fit(
        Path(run_dir), WithTest, logger=trackers, max_epochs=1, log_every_n_steps=2,
        monitor="val_loss", callbacks=lambda: [Artifacts(None, run_dir, 1, wandb=True)],
    )  # fmt: skip
    part.trainer.test(part.module, batches(shuffle=False), verbose=False)


def rows_of_csv(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def records_of_wandb(run_dir: Path) -> list[Any]:
    (path,) = run_dir.glob("wandb/offline-run-*/run-mine.wandb")
    return read_wandb(path)


def read_wandb(path: Path) -> list[Any]:
    """What W&B has written for `wandb sync`: LevelDB's format of logs, after a header of 7 bytes.

    A block of 32 KiB holds pieces: checksum (4 bytes), length (2), kind (1), and the data. Kinds:
    1 whole record, 2 its first piece, 3 a middle one, 4 the last one.
    """
    from wandb.proto import wandb_internal_pb2  # takes a second, in each process of pytest-xdist

    content, position, pieces, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        length, kind = struct.unpack_from("<HB", content, position + 4) if left >= 7 else (0, 0)
        if kind == 0:  # the rest of the block is empty
            position += left
            continue
        pieces += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pieces)
            records.append(record)
            pieces = b""
    return records


def history_of_wandb(run_dir: Path) -> dict[str, dict[int, Any]]:
    """The values of each name by ``trainer/global_step``."""
    found: dict[str, dict[int, Any]] = {}
    for record in records_of_wandb(run_dir):
        items = {".".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
        if "trainer/global_step" in items:
            step = int(float(items.pop("trainer/global_step")))
            for name, value in items.items():
                found.setdefault(name, {})[step] = json.loads(value)
    return found


def history_of_tensorboard(run_dir: Path) -> dict[str, dict[int, float]]:
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return {
        name: {event.step: event.value for event in events.Scalars(name)}
        for name in events.Tags()["scalars"]
    }


def mlflow_run_of(run_dir: Path) -> tuple[Any, str]:
    from mlflow import MlflowClient  # takes seconds, also in the processes with W&B

    client = MlflowClient((run_dir / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("project")
    (found,) = client.search_runs([experiment.experiment_id])
    return client, found.info.run_id


@pytest.mark.program
@pytest.mark.usefixtures("no_mlflow_variables")
def test_all_trackers_have_the_metrics_and_wandb_has_the_model(tmp_path: Path, monkeypatch):
    code = f"import sys; from {__name__} import *; track(sys.argv[1])"
    done = run_code(code, str(tmp_path), WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    tracked = tmp_path / "mine"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    wandb_history, tensorboard = history_of_wandb(tracked), history_of_tensorboard(tracked)
    client, mlflow_id = mlflow_run_of(tracked)
    found = client.get_run(mlflow_id)
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
    assert found.data.params == {"model/lr": "0.125"}
    other, other_id = mlflow_run_of(tmp_path / "other")
    assert other.get_run(other_id).info.run_name == "other"
    rows = rows_of_csv(tracked)
    for name in ("step/loss", "step/lr", "val_loss", "test_loss"):
        expected = {int(row["step"]): float(row[name]) for row in rows if row[name]}
        assert len(expected) == (2 if name.startswith("step/") else 1)
        metrics = client.get_metric_history(mlflow_id, name)
        for found in (
            wandb_history[name],
            tensorboard[name],
            {metric.step: metric.value for metric in metrics},
        ):
            assert found.keys() == expected.keys(), name
            for step, value in expected.items():
                assert found[step] == pytest.approx(value, rel=1e-6)
    assert [int(row["step"]) for row in rows if row["step/loss"]] == [1, 3]

    records = records_of_wandb(tracked)
    artifacts = [r.request.log_artifact.artifact for r in records]
    artifacts += [r.artifact for r in records]
    (model,) = [a for a in artifacts if a.type == "model"]
    assert model.name == "run-mine"
    paths = {entry.path for entry in model.manifest.contents}
    assert paths == {"best.ckpt", "config.yaml"}
