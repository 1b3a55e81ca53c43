"""Several processes on this machine, started and watched by torchrun's own agent."""

import logging
import signal
import sys
from pathlib import Path

from omegaconf import DictConfig

from project import environment
from project.config import ConfigError

TRAIN = Path(__file__).parents[2] / "train.py"
EXIT_SIGTERM = 128 + signal.SIGTERM  # 143


def num_processes(cfg: DictConfig) -> int:
    """How many processes to start here: 1 under torchrun, which has started them all.

    Raises:
        ConfigError: if this machine has too few devices, or the run needs other machines.
    """
    devices, nodes = cfg.trainer.devices, cfg.trainer.num_nodes
    if environment.under_torchrun():
        return 1
    if nodes > 1:
        raise ConfigError(
            f"trainer.num_nodes={nodes}: several nodes are started by torchrun; on each of them:\n"
            f"  torchrun --nnodes={nodes} --nproc-per-node={devices} --node-rank=N "
            "--master-addr=NODE_0 train.py ..."
        )
    if devices == 1 or (devices == "auto" and cfg.trainer.accelerator == "cpu"):
        return 1
    import torch  # counts the devices

    gpus = torch.cuda.device_count() if cfg.trainer.accelerator in {"auto", "gpu", "cuda"} else 0
    if devices == "auto":
        return max(1, gpus)
    wants_gpus = gpus > 0 or cfg.trainer.accelerator in {"gpu", "cuda"}
    if wants_gpus and devices > gpus:
        raise ConfigError(
            f"trainer.devices={devices}: this machine has {gpus} GPUs; choose fewer, or "
            "trainer.accelerator=cpu"
        )
    return int(devices)


def start(arguments: list[str], num_processes: int, *, run_id: str, script: Path = TRAIN) -> int:
    """Run ``script`` with these arguments in several processes, and wait for them.

    When one process fails the others are stopped.

    Returns:
        The exit code: that of the process that failed first, 0 if none did.
    """
    environment.limit_threads(num_processes)
    environment.set_variable("RUN_ID", run_id)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # said below
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=run_id,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, entrypoint=sys.executable)("-u", str(script), *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == -signal.SIGTERM:
            return EXIT_SIGTERM
        if failure.exitcode < 0:
            cause = signal.Signals(-failure.exitcode).name
            print(f"error: rank {rank} was ended by {cause}", file=sys.stderr)
        return max(1, failure.exitcode)
    except SignalException as error:
        return 128 + error.sigval
    return 0
