"""A run as a workflow of Flyte: one task downloads the data, the next one trains.

pyflyte run scripts/flyte_workflow.py training --hyperparameters '{"epochs": 2, "lr": 0.01}'
samestep launch cluster=flyte trainer.devices=2                  # on a cluster: submits it

The environment variable FLYTE_OVERRIDES='["cluster=flyte", "trainer.devices=2"]' lists overrides of
train.py. They decide what the tasks ask of the cluster, such as the number of processes, and are
handed to the pods. The hyperparameters are those of one execution.
"""

import csv
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

# Flyte's Elastic task spawns the processes that train. They import this file by its name, and get
# the path of this process for that; pyflyte does not leave the folder of the file in it.
sys.path.insert(0, str(Path(__file__).resolve().parent))
# The examples lie beside scripts/.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from filelock import FileLock
from flytekit import Resources, Secret, current_context, task, workflow
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from flytekitplugins.kfpytorch import Elastic
from omegaconf import DictConfig

from samestep import ConfigError, RunError, build_datamodule, compose_run

# The program is pyflyte, or pyflyte-execute in a pod, and may be called in any folder.
os.environ["SAMESTEP_PROJECT"] = str(Path(__file__).resolve().parents[1])
WORDS = json.loads(os.environ.get("FLYTE_OVERRIDES") or '["cluster=flyte"]')
CFG = compose_run(WORDS)
CLUSTER = CFG.cluster
if CFG.trainer.devices == "auto" or CFG.trainer.num_nodes > 1:
    raise ConfigError(
        f"trainer.devices={CFG.trainer.devices} trainer.num_nodes={CFG.trainer.num_nodes}: a task "
        "of Flyte is one node and asks for a number of devices; set trainer.devices=NUMBER and "
        "trainer.num_nodes=1"
    )
GPUS = str(CLUSTER.gpus) if CFG.trainer.accelerator in ("auto", "gpu") else None
SECRETS = [
    Secret(**secret, mount_requirement=Secret.MountType.ENV_VAR)
    for secret in [CLUSTER.secret]
    if secret
]
# The pods import this file too, and must see the same configuration.
VARIABLES = {"FLYTE_OVERRIDES": json.dumps(WORDS)}
# Without this, Flyte sets one thread for each process.
THREADS = max(1, len(os.sched_getaffinity(0)) // CFG.trainer.devices)
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))


@dataclass
class Hyperparameters:
    """What one execution changes in the configuration; None keeps the configured value."""

    epochs: int | None = None
    batch_size: int | None = None  # images per optimizer step, over all processes
    lr: float | None = None
    seed: int | None = None
    overrides: list[str] = field(default_factory=list)  # other keys, as for train.py

    def words(self) -> list[str]:
        """These values as overrides of train.py."""
        values = {
            "trainer.max_epochs": self.epochs,
            "data.global_batch_size": self.batch_size,
            "model.optimizer.lr": self.lr,
            "seed": self.seed,
        }
        given = [f"{key}={value}" for key, value in values.items() if value is not None]
        return [*WORDS, *given, *self.overrides]


class Result(NamedTuple):
    """What a run returns to later tasks."""

    epoch_accuracies: list[float]  # validation accuracy after each epoch
    model: FlyteFile  # the checkpoint with the highest one
    run: FlyteDirectory  # the run directory, for samestep.load_run


@task(
    requests=Resources(
        cpu=str(CLUSTER.cpus),
        mem=CLUSTER.memory,
        ephemeral_storage=CLUSTER.disk,
    ),
    limits=Resources(mem=CLUSTER.memory),
    retries=CLUSTER.retries,
    environment=VARIABLES,
)
def prepare(hyperparameters: Hyperparameters) -> FlyteDirectory:
    """Download and verify the data before any process trains."""
    cfg = compose_run([*hyperparameters.words(), "cluster.download=true"])
    folder = Path(current_context().working_directory, "data")
    folder.mkdir(parents=True)
    cfg.data.root = str(folder)
    data = build_datamodule(cfg)
    try:
        data.prepare_data()
        data.setup("fit")
    except RunError as error:
        if error.is_final is not False:
            raise
        # The network may be the reason, and Flyte repeats a task only after this exception.
        raise FlyteRecoverableException(str(error)) from error
    # The digits are not downloaded: without this file the directory would be empty.
    (folder / "data.json").write_text(json.dumps(cfg.choices.data))
    return FlyteDirectory(str(folder))


@task(
    task_config=Elastic(
        nnodes=1,
        nproc_per_node=CFG.trainer.devices,
        max_restarts=CLUSTER.max_restarts,
        monitor_interval=1,
    ),
    requests=Resources(
        cpu=str(CLUSTER.cpus),
        mem=CLUSTER.memory,
        gpu=GPUS,
        ephemeral_storage=CLUSTER.disk,
    ),
    limits=Resources(mem=CLUSTER.memory, gpu=GPUS),
    shared_memory=CLUSTER.shm,
    secret_requests=SECRETS,
    retries=CLUSTER.retries,
    interruptible=CLUSTER.interruptible,
    environment=VARIABLES,
)
def fit(hyperparameters: Hyperparameters, data: FlyteDirectory) -> Result:
    """Train and test. Each process calls this; Flyte takes the result of rank zero."""
    from project.train import train

    # Without a cluster, Flyte calls every execution "local"; each needs a name of its own.
    if os.environ.get("TORCHELASTIC_RUN_ID") == "local":
        os.environ["TORCHELASTIC_RUN_ID"] = "none"
    words = hyperparameters.words()
    try:
        cfg = compose_run(words)
        cfg.data.root = str(on_this_node(data, cfg))
        train(cfg, words)
    except (ConfigError, RunError):
        raise  # another attempt would fail in the same way
    except Exception as error:
        raise FlyteRecoverableException(f"{type(error).__name__}: {error}") from error
    run_dir = Path(cfg.run_dir)
    with (run_dir / "metrics.csv").open(encoding="utf-8") as file:
        accuracies = [row["val/accuracy"] for row in csv.DictReader(file)]
    best = run_dir / "checkpoints/best.ckpt"
    return Result(
        [float(accuracy) for accuracy in accuracies if accuracy],
        FlyteFile(str(best if best.exists() else best.with_name("last.ckpt"))),
        FlyteDirectory(str(run_dir)),
    )


def on_this_node(data: FlyteDirectory, cfg: DictConfig) -> Path:
    """Where the images are on this node: one process downloads them from Flyte's store for all."""
    root = Path(cfg.run_root, f".{cfg.run_id}-data").absolute()
    root.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{root}.lock"):
        if not root.exists():
            # An earlier execution may have left a link whose folder is gone.
            root.unlink(missing_ok=True)
            root.symlink_to(Path(data.download()).absolute())
    return root


DEFAULTS = Hyperparameters()


@workflow
def training(hyperparameters: Hyperparameters = DEFAULTS) -> Result:
    """Download the data, then train."""
    return fit(hyperparameters=hyperparameters, data=prepare(hyperparameters=hyperparameters))
