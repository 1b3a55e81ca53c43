"""The predictions of a run in W&B, and its values in TensorBoard, on two ranks.

Stops, kills and servers of trackers: the library's test_loggers.py. What each tracker has of the
predictions: the library's callbacks/test_predictions.py.
"""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from tests.conftest import run

pytestmark = pytest.mark.program

Points = dict[str, list[tuple[int, float]]]


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
    return step, 0.0 if "second" in name or name.startswith("time/") else float(value)


def test_each_tracker_has_the_predictions_and_each_value_once(tmp_path: Path):
    run_dir = tmp_path / "mine"
    words = [
        "model=mlp", "logger=[tensorboard,wandb,mlflow]", "report=false", "trainer.accelerator=cpu",
        "trainer.max_epochs=2", "data.global_batch_size=60", "trainer.log_every_n_steps=5",
        f"run_root={tmp_path}", "+callbacks.saboteur._target_=labs.faults.saboteur.Saboteur",
        f"+callbacks.saboteur.dirpath={tmp_path}/faults",
        "+callbacks.saboteur.faults=[kill step 33 0]",
    ]  # fmt: skip
    for exit_code, more in ((-9, ["logger=tensorboard"]), (0, ["trainer.devices=2"])):
        secrets = {"WANDB_MODE": "offline", "SECRET_TOKEN": "value-of-the-secret"}
        result = run("train.py", *words, *more, RUN_ID="mine", **secrets)
        assert result.returncode == exit_code, result.stdout + result.stderr
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert {"tensorboard", "wandb", "mlflow"} < {p.relative_to(run_dir).parts[0] for p in files}
    assert not any(b"value-of-the-secret" in path.read_bytes() for path in files)
    expected = points_of_csv(run_dir)
    assert len(expected["step/loss"]) == 8

    events = EventAccumulator(str(run_dir / "tensorboard"), {"tensors": 0, "scalars": 0}).Reload()
    for name, points in expected.items():
        found = [point_of(name, event.step, event.value) for event in events.Scalars(name)]
        # TensorBoard keeps 32 bits of a value.
        assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in points], name
    text = events.Tensors("config.yaml/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "    model:\n" in text
    start = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(start).session_start_info.hparams
    assert hparams["model/optimizer/lr"].string_value == "0.003"
    assert "hp_metric" not in events.Tags()["scalars"]

    # Of 360 test images of ten digits.
    (table,) = run_dir.glob("wandb/offline-run-*/files/media/table/test/predictions_*.json")
    content = json.loads(table.read_text())
    assert content["columns"] == ["id", "truth", "guess", "probability", *"0123456789"]
    assert [row[0] for row in content["data"]] == list(range(360))
    assert [*run_dir.glob("wandb/offline-run-*/files/media/images/test/grid_*.png")]
