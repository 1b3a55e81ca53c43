"""``samestep sweep`` with real trials: several processes each, killed in the middle."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import optuna
from omegaconf import OmegaConf
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from samestep.hydra.compose import check
from samestep.run.changes import read_config
from tests.conftest import CONFIGS, NO_PICTURES, ROOT, environment, run

SWEEP = ("-m", "samestep", "sweep")
WORDS = [
    "sweep=digits_lr", "n_trials=2", "model=mlp", "trainer.max_epochs=2", "trainer.devices=2",
    "trainer.accelerator=cpu", "callbacks.last.every_s=1e-9", "trainer.limit_train_batches=10",
    "trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "report=false", NO_PICTURES,
]  # fmt: skip


def test_a_search_with_trials_of_two_ranks_survives_a_kill(tmp_path: Path):
    folder = tmp_path / "sweeps/digits-lr"
    words = [*SWEEP, *WORDS, f"run_root={tmp_path}"]
    with subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL
    ) as first:
        deadline = time.monotonic() + 120
        while not list(folder.glob("digits-lr-0/checkpoints/last.ckpt")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        first.kill()

    done = run(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    backend = JournalFileBackend(str(folder / "journal.log"))
    study = optuna.load_study(study_name="digits-lr", storage=JournalStorage(backend))
    states = [trial.state.name for trial in study.trials]
    assert len(states) == 2
    assert set(states) <= {"COMPLETE", "PRUNED"}
    for trial in study.trials:
        run_dir = folder / f"digits-lr-{trial.number}"
        record = json.loads((run_dir / "run.json").read_text())
        assert record["run_id"] == run_dir.name
        assert len({tuple(start["command"]) for start in record["starts"]}) == 1
        if trial.state.name == "COMPLETE":
            assert record["state"] == "finished"
            lines = (run_dir / "metrics.csv").read_text().splitlines()
            column = lines[0].split(",").index("val/accuracy")
            values = [line.split(",")[column] for line in lines[1:]]
            assert trial.value == max(float(value) for value in values if value)

    # The file of the best trial composes to the configuration of its run.
    name = "digits_lr_best"
    assert f"cp {folder}/best.yaml configs/experiment/{name}.yaml" in done.stdout
    shutil.copytree(CONFIGS, tmp_path / "configs")
    shutil.copy(folder / "best.yaml", tmp_path / f"configs/experiment/{name}.yaml")
    cfg = check([f"experiment={name}"], configs=tmp_path / "configs")
    best = read_config(folder / f"digits-lr-{study.best_trial.number}")
    for node in ("model", "data", "trainer"):
        assert OmegaConf.to_container(cfg[node], resolve=True) == best[node]
