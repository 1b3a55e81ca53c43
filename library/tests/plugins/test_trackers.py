"""Loggers of Lightning in a plain script, made as everybody makes them."""

import csv
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from library.tests.kit import fit
from library.tests.programs import run
from library.tests.test_loggers import read_wandb
from samestep import plugin
from samestep.plugins.trackers import Trackers
from samestep.run import record
from samestep.tracker import NullLogger

SCRIPT = """
import os, signal, sys
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from library.tests.kit import Net, batches
from samestep import Trainer

class Own(Net):
    def __init__(self, lr=0.01):
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        if len(sys.argv) > 1 and self.global_step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.Signals[sys.argv[1]])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.logger.experiment.add_scalar("own", 1.0, self.global_step)
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

loggers = [
    TensorBoardLogger("tb", name="net"),
    CSVLogger("csv"),
    WandbLogger(project="mine", offline=True),
    MLFlowLogger("mine", tracking_uri="file:./mlflow"),
]
options = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
trainer = Trainer(
    run_dir="mine", max_epochs=3, accelerator="cpu", logger=loggers, save_every_s=1e9, **options
)
model = Own()
loggers[1].log_hyperparams({"extra": 5})
trainer.fit(model, batches(), batches())
trainer.test(model, batches(), verbose=False)
"""
SHOWN = "train_loss", "val_loss", "test_loss", "lr", "hp_metric"


def steps_of_csv(path: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in SHOWN}
    with path.open() as file:
        for row in csv.DictReader(file):
            for name in SHOWN:
                if row.get(name):
                    found[name].append((int(row["step"]), float(row[name])))
    return found


def steps_of_tensorboard(folder: Path, *names: str) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    tags = events.Tags()["scalars"]
    found = {name: events.Scalars(name) if name in tags else [] for name in names or SHOWN}
    return {name: [(e.step, e.value) for e in scalars] for name, scalars in found.items()}


def steps_of_mlflow(folder: Path) -> dict[str, list[tuple[int, float]]]:
    (metrics,) = folder.glob("[0-9]*/*/metrics")
    found = {}
    for name in SHOWN:
        path = metrics / name
        lines = path.read_text().splitlines() if path.exists() else []
        found[name] = [(int(line.split()[2]), float(line.split()[1])) for line in lines]
    return found


@pytest.mark.program
def test_a_killed_and_a_stopped_run_continue_in_the_same_loggers(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    variables = {"MLFLOW_ALLOW_FILE_STORE": "true"}
    for words, code in ((("SIGKILL", "5"), -9), (("SIGTERM", "7"), 143), ((), 0)):
        done = run(str(script), *words, cwd=tmp_path, **variables)
        assert done.returncode == code, done.stderr
        assert "will be deleted" not in done.stderr
    history = steps_of_csv(tmp_path / "mine/metrics.csv")
    assert [step for step, _ in history["train_loss"]] == list(range(12))
    assert len(history["test_loss"]) == 1
    assert sorted(path.name for path in tmp_path.glob("*/*/version_*")) == 2 * ["version_0"]
    # Hidden: step 4, which has the number of the first step that the killed run repeated.
    assert steps_of_tensorboard(tmp_path / "tb/net/version_0", "own")["own"] == [
        (0, 1), (8, 1), (12, 1),
    ]  # fmt: skip
    of_tensorboard = steps_of_tensorboard(tmp_path / "tb/net/version_0")
    assert of_tensorboard.pop("hp_metric") == [(0, -1)]
    history.pop("hp_metric")
    of_loggers = {
        "csv": steps_of_csv(tmp_path / "csv/lightning_logs/version_0/metrics.csv"),
        "tensorboard": of_tensorboard,
        "mlflow": steps_of_mlflow(tmp_path / "mlflow"),
    }
    for logger, found in of_loggers.items():
        for name, steps in history.items():
            assert [step for step, _ in found[name]] == [step for step, _ in steps], (logger, name)
            values = [value for _, value in steps]
            assert [value for _, value in found[name]] == pytest.approx(values, rel=1e-6)
    # W&B loses the newest 32 kB of a process that was killed, and cannot forget a step.
    paths = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({path.name for path in paths}) == 1
    steps = Counter()
    for path in paths:
        for entry in read_wandb(path):
            items = {".".join(i.nested_key) or i.key: i.value_json for i in entry.history.item}
            if "train_loss" in items:
                steps[int(json.loads(items["trainer/global_step"]))] += 1
    assert [steps[step] for step in range(5, 12)] == 7 * [1]

    def files() -> list[tuple[Path, bytes]]:
        paths = [path for path in tmp_path.rglob("*") if path.is_file()]
        return [(path, path.read_bytes()) for path in sorted(paths) if "mine" not in path.parts]

    before = files()
    done = run(str(script), cwd=tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    assert files() == before


def test_a_logger_that_was_used_before_is_named(tmp_path: Path, capsys):
    fit(tmp_path / "mine", max_epochs=1, logger=CSVLogger(tmp_path / "csv"))
    logger = CSVLogger(tmp_path / "csv")
    _ = logger.experiment
    fit(tmp_path / "mine", max_epochs=1, logger=logger)
    note = "Note: CSVLogger was used before the Trainer was made, so it begins 1 and does not"
    assert note in capsys.readouterr().out


def test_a_place_that_the_script_chooses_counts(tmp_path: Path):
    for num_epochs, place in enumerate(("first", "second"), start=1):
        logger = TensorBoardLogger(tmp_path / "tb", version=place)
        fit(tmp_path / "mine", max_epochs=num_epochs, logger=logger)
        assert logger.version == place
    assert list(record.read(tmp_path / "mine").trackers.values()) == ["second"]


def test_a_line_that_a_killed_process_has_begun_is_removed(tmp_path: Path):
    fit(tmp_path / "mine", max_epochs=1, logger=CSVLogger(tmp_path / "csv"))
    path = tmp_path / "csv/lightning_logs/version_0/metrics.csv"
    with path.open("a") as file:
        file.write("0,1")
    fit(tmp_path / "mine", max_epochs=2, logger=CSVLogger(tmp_path / "csv"))
    assert [step for step, _ in steps_of_csv(path)["train_loss"]] == list(range(8))


def test_a_second_fit_in_one_process_repeats_no_step(tmp_path: Path):
    """As in a notebook, where the logger is the same object."""
    loggers = [TensorBoardLogger(tmp_path / "tb"), CSVLogger(tmp_path / "csv")]
    fit(tmp_path / "mine", places=[(1, 1)], how="SIGKILL", logger=loggers)
    folder = "lightning_logs/version_0"
    for found in (
        steps_of_csv(tmp_path / "csv" / folder / "metrics.csv"),
        steps_of_tensorboard(tmp_path / "tb" / folder),
    ):
        assert [step for step, _ in found["train_loss"]] == list(range(8))


class Elsewhere(Logger):
    """Of a third party."""

    name = version = "elsewhere"

    def log_metrics(self, metrics, step=None):
        pass

    log_hyperparams = log_metrics


def test_the_plug_in_of_a_logger_is_found_by_its_class(tmp_path: Path, monkeypatch):
    known = plugin.Loggers()
    other = SimpleNamespace(
        loggers=lambda given, run_dir: known if isinstance(given[0], Elsewhere) else None
    )
    monkeypatch.setattr(plugin, "load", lambda named: [other])
    assert plugin.loggers_of([NullLogger("")], tmp_path) == []
    assert plugin.loggers_of([Elsewhere()], tmp_path) == [known]
    (own,) = plugin.loggers_of([NullLogger(""), CSVLogger(tmp_path)], tmp_path)
    assert isinstance(own, Trackers)
