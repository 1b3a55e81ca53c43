"""A run with all trackers, which is stopped, killed and continued on two ranks."""

import csv
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from tests.conftest import environment, run

SERVER = """
import sys
from mlflow.server import app
from werkzeug.serving import make_server
server = make_server("127.0.0.1", 0, app, threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""
Points = dict[str, list[tuple[int, float]]]


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """MLflow's own server with a database; its command needs packages that mlflow-skinny lacks."""
    root = tmp_path_factory.mktemp("mlflow")
    places = {"FILE_STORE": f"sqlite:///{root}/db", "ARTIFACT_ROOT": str(root / "artifacts")}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=environment(**{f"_MLFLOW_SERVER_{name}": value for name, value in places.items()}),
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdout
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.terminate()


def points_of_csv(run_dir: Path) -> Points:
    """The points of each curve in metrics.csv; of seconds only the steps."""
    points: Points = {}
    with (run_dir / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            step = int(row.pop("step"))
            for name in row.keys() - {"epoch"}:
                if row[name]:
                    points.setdefault(name, []).append(point_of(name, step, row[name]))
    return points


def point_of(name: str, step: int, value: Any) -> tuple[int, float]:
    return step, 0.0 if "second" in name or name.startswith("time/") else round(float(value), 5)


def test_each_tracker_has_each_value_once_and_the_pictures(tmp_path: Path, mlflow_server: str):
    from mlflow import MlflowClient  # takes seconds, in each process of pytest-xdist

    client, run_dir = MlflowClient(mlflow_server), tmp_path / "mine"
    words = [
        "model=mlp", "logger=[tensorboard,mlflow]", "report=false", "trainer.accelerator=cpu",
        "trainer.max_epochs=2", "data.global_batch_size=60", "trainer.log_every_n_steps=5",
        f"run_root={tmp_path}",
        "+callbacks.saboteur._target_=tests.faults.saboteur.Saboteur",
        f"+callbacks.saboteur.dirpath={tmp_path}/faults",
        "+callbacks.saboteur.faults=[term step 13 0,kill step 33 0]",
        f"logger.mlflow.tracking_uri={mlflow_server}", "logger.mlflow.experiment=disturbed",
    ]  # fmt: skip
    states: list[Any] = []
    # The starts of W&B are one run: the library's callbacks/test_loggers.py.
    at_last = ["trainer.devices=2", "logger=[tensorboard,wandb,mlflow]"]
    for exit_code, more in ((143, []), (-9, []), (0, at_last)):
        result = run("train.py", *words, *more, RUN_ID="mine", WANDB_MODE="offline")
        assert result.returncode == exit_code, result.stdout + result.stderr
        experiment = client.get_experiment_by_name("disturbed")
        states += client.search_runs([experiment.experiment_id])
    expected = points_of_csv(run_dir)
    assert len(expected["step/loss"]) == 8

    (run_id,) = {run.info.run_id for run in states}
    assert [run.info.status for run in states] == ["KILLED", "RUNNING", "FINISHED"]
    assert states[-1].data.params["model/optimizer/lr"] == "0.003"
    for name, points in expected.items():
        metrics = client.get_metric_history(run_id, name)
        assert sorted(point_of(name, m.step, m.value) for m in metrics) == points, name
    pictures = {file.path for file in client.list_artifacts(run_id, "test")}
    assert pictures == {"test/confusion_matrix.png", "test/grid.png"}

    events = EventAccumulator(str(run_dir / "tensorboard"), {"tensors": 0, "scalars": 0}).Reload()
    for name, points in expected.items():
        found = [point_of(name, event.step, event.value) for event in events.Scalars(name)]
        assert found == points, name
    text = events.Tensors("config.yaml/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "    model:\n" in text
    start = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(start).session_start_info.hparams
    assert hparams["model/optimizer/lr"].string_value == "0.003"
    assert "hp_metric" not in events.Tags()["scalars"]
    assert set(events.Tags()["images"]) == {"test/confusion_matrix", "test/grid"}
    (image,) = events.Images("test/grid")
    assert image.encoded_image_string.startswith(b"\x89PNG")

    names = {path.name for path in run_dir.glob("wandb/offline-run-*/files/media/*/test/*")}
    shown = {name.rpartition("_")[0].rstrip("_0123456789") for name in names}
    assert shown == {"confusion_matrix", "grid"}
