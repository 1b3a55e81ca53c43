"""A run as a workflow of Flyte: one task fetches the data, the next one trains.

pyflyte run scripts/flyte_workflow.py training --hyperparameters '{"epochs": 2, "lr": 0.01}'
python scripts/launch.py cluster=flyte trainer.devices=2                  # on a cluster: submits it

FLYTE_OVERRIDES='["cluster=flyte", "trainer.devices=2"]', in the environment, lists overrides of
train.py that the tasks are made of, with their number of processes; their pods get it too. The
hyperparameters are those of one execution.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the processes that train import this
from filelock import FileLock
from flytekit import Resources, Secret, current_context, task, workflow
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from flytekitplugins.kfpytorch import Elastic
from omegaconf import DictConfig

from samestep.config.compose import check
from samestep.errors import ConfigError, RunError
from samestep.launch import render
from samestep.ranks import environment

WORDS = json.loads(environment.variable("FLYTE_OVERRIDES") or '["cluster=flyte"]')
CFG = check(WORDS)
CLUSTER = CFG.cluster
if CFG.trainer.devices == "auto" or CFG.trainer.num_nodes > 1:
    raise ConfigError(
        f"trainer.devices={CFG.trainer.devices} trainer.num_nodes={CFG.trainer.num_nodes}: a task "
        "of Flyte is one node and asks for a number of devices; set trainer.devices=NUMBER and "
        "trainer.num_nodes=1"
    )
GPUS = str(CLUSTER.gpus) if render.uses_gpus(CFG) else None
SECRETS = [
    Secret(**secret, mount_requirement=Secret.MountType.ENV_VAR, env_var="WANDB_API_KEY")
    for secret in [CLUSTER.secret]
    if secret
]
VARIABLES = {"FLYTE_OVERRIDES": json.dumps(WORDS)}  # the pods import this file too
environment.limit_threads(CFG.trainer.devices)  # Flyte's default is one for each process


@dataclass
class Hyperparameters:
    """What one execution changes in the configuration; None: as it is there."""

    epochs: int | None = None
    batch_size: int | None = None  # images per step, over all processes
    lr: float | None = None
    seed: int | None = None
    overrides: list[str] = field(default_factory=list)  # more, as for train.py

    def words(self) -> list[str]:
        """The overrides of train.py that say the same."""
        values = {
            "trainer.max_epochs": self.epochs,
            "data.global_batch_size": self.batch_size,
            "model.optimizer.lr": self.lr,
            "seed": self.seed,
        }
        given = [f"{key}={value}" for key, value in values.items() if value is not None]
        return [*WORDS, *given, *self.overrides]


class Result(NamedTuple):
    """What a run gives to the tasks after it."""

    epoch_accuracies: list[float]  # of validation, after each epoch
    model: FlyteFile  # the checkpoint with the best of them
    run: FlyteDirectory  # all that the run has left, for project.load_run


@task(
    requests=Resources(cpu="1", mem="4Gi", ephemeral_storage=CLUSTER.disk),
    retries=CLUSTER.retries,
    environment=VARIABLES,
)
def prepare(hyperparameters: Hyperparameters) -> FlyteDirectory:
    """Fetch and verify the images, before any process trains."""
    from samestep.build import build  # torch, which takes seconds

    data = check(hyperparameters.words()).data
    folder = Path(current_context().working_directory, "data")
    folder.mkdir(parents=True)
    source = build(data.source, "data.source")
    try:
        source.prepare(folder, download=True, mirror=data.mirror)
    except RunError as error:  # of the network, perhaps: Flyte tries only these again
        raise FlyteRecoverableException(str(error)) from error
    (folder / "source.json").write_text(json.dumps(data.source._target_))  # digits have no file
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
    """Train and test; in each of the processes, of which rank zero's result counts."""
    from project.train import train
    from samestep.run.name import name_run
    from samestep.run.records import read_history

    if environment.run_id() == "local":  # Flyte's name for each execution without a cluster
        environment.set_variable("TORCHELASTIC_RUN_ID", "none")
    words = hyperparameters.words()
    try:
        cfg = check(words)
        cfg.run_id = name_run(cfg)
        cfg.data.root = str(on_this_node(data, cfg))
        train(cfg, words)
    except (ConfigError, RunError):
        raise  # again would be no better
    except Exception as error:
        raise FlyteRecoverableException(f"{type(error).__name__}: {error}") from error
    run_dir = Path(cfg.run_dir)
    rows = read_history(run_dir)
    return Result(
        [row["val/accuracy"] for row in rows if "val/accuracy" in row],
        FlyteFile(str(run_dir / "checkpoints" / "best.ckpt")),
        FlyteDirectory(str(run_dir)),
    )


def on_this_node(data: FlyteDirectory, cfg: DictConfig) -> Path:
    """The images, fetched from Flyte's store by one of the processes for all of them."""
    root = Path(cfg.run_root, f".{cfg.run_id}-data").absolute()
    root.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{root}.lock"):
        if not root.exists():
            root.unlink(missing_ok=True)  # to a folder of before that has gone
            root.symlink_to(Path(data.download()).absolute())
    return root


DEFAULTS = Hyperparameters()


@workflow
def training(hyperparameters: Hyperparameters = DEFAULTS) -> Result:
    """Fetch the data, then train."""
    return fit(hyperparameters=hyperparameters, data=prepare(hyperparameters=hyperparameters))
