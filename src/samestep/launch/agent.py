"""Several processes on this machine, started and watched by torchrun's own agent."""

import logging
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from omegaconf import DictConfig

from samestep.errors import ConfigError
from samestep.ranks import environment

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

TRAIN = Path(__file__).parents[3] / "train.py"
EXIT_CONFIG = 2
EXIT_SIGTERM = 128 + signal.SIGTERM  # 143
STOPPED = (EXIT_SIGTERM, -signal.SIGTERM)  # after saving, or before there was anything to save
_ERROR = re.compile(r"(\[rank\d+\]: )?(error: |[\w.]+(Error|Exception)\b)")  # torch names its rank


class Outcome(NamedTuple):
    """How the processes ended: the exit code of the first that failed, and what it died of."""

    exit_code: int
    cause: str = ""


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
    if devices == 1:
        return 1
    gpus = num_gpus(cfg)
    if devices == "auto":
        return max(1, gpus)
    wants_gpus = gpus > 0 or cfg.trainer.accelerator in {"gpu", "cuda"}
    if wants_gpus and devices > gpus:
        raise ConfigError(
            f"trainer.devices={devices}: this machine has {gpus} GPUs; choose fewer, or "
            "trainer.accelerator=cpu"
        )
    return int(devices)


def num_gpus(cfg: DictConfig) -> int:
    """How many GPUs of this machine the run may use."""
    if cfg.trainer.accelerator not in {"auto", "gpu", "cuda"}:
        return 0
    import torch  # counts them

    return torch.cuda.device_count()


def start(arguments: list[str], num_processes: int, *, run_id: str, script: Path = TRAIN) -> int:
    """Run ``script`` with these arguments in several processes, and wait for them.

    When one process fails the others are stopped.

    Returns:
        The exit code: that of the process that failed first, 0 if none did.
    """
    environment.limit_threads(num_processes)
    environment.set_variable("RUN_ID", run_id)
    from torch.distributed.launcher.api import LaunchConfig

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
    outcome = launch(config, arguments, script=script)
    if outcome.cause:
        print(f"error: {outcome.cause}", file=sys.stderr)
    return outcome.exit_code


def launch(config: "LaunchConfig", arguments: Sequence[str], script: Path = TRAIN) -> Outcome:
    """Be torchrun's agent for ``script`` until all its processes have ended.

    Processes that fail are started again, as often as ``config`` says; not those whose
    configuration is wrong, and those that SIGTERM stopped only where nodes may come and go.

    Returns:
        Exit code 0, or that of the process that failed first: 137 for SIGKILL, 143 for SIGTERM.
        The cause is the last error in the log of its stderr, where ``config`` keeps one.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # said here
    from torch.distributed import DistError
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher import api

    final = {EXIT_CONFIG}
    if config.min_nodes == config.max_nodes:
        # A node was told to stop, and without it the others cannot go on. They would wait for a
        # new one in vain: of node 0, which takes the store with it, their agents never hear again.
        final.add(EXIT_SIGTERM)

    class Agent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if final & {failure.exitcode for failure in result.failures.values()}:
                self._remaining_restarts = 0
            return result

    api.LocalElasticAgent = Agent  # type: ignore[attr-defined]
    try:
        api.elastic_launch(config, entrypoint=sys.executable)("-u", str(script), *arguments)
    except ChildFailedError as error:
        said = {rank: _Said(config, failure) for rank, failure in error.failures.items()}
        rank = _first(error.failures, said)
        code = error.failures[rank].exitcode
        if code in STOPPED:
            return Outcome(EXIT_SIGTERM)
        if code < 0:
            why = " (out of memory?)" if code == -signal.SIGKILL else ""
            name = signal.Signals(-code).name
            return Outcome(128 - code, f"rank {rank} was ended by {name}{why}")
        ours = [rank, *(other for other in said if said[other].error.startswith("error: "))]
        cause = f"rank {ours[-1]}: {said[ours[-1]].error}"
        return Outcome(code, cause if said[ours[-1]].error else "")
    except SignalException as error:
        return Outcome(128 + error.sigval)
    except (DistError, RendezvousError) as error:
        why = str(error.__cause__ or error).partition("\n")[0]
        return Outcome(1, f"{config.rdzv_endpoint}: the nodes cannot meet, or no more ({why})")
    return Outcome(0)


class _Said:
    """The last error in the newest file with the stderr of a process, and when it was written."""

    def __init__(self, config: "LaunchConfig", failure: "ProcessFailure") -> None:
        self.at, self.error = 0.0, ""
        root = Path(config.logs_specs.root_log_dir) if config.logs_specs else Path()
        files = root.glob(f"*/attempt_*/{failure.local_rank}/stderr.log")
        if log := max(files, key=lambda path: path.stat().st_mtime, default=None):
            self.at = log.stat().st_mtime
            self.error = last_error(log.read_text(errors="replace"))


def last_error(text: str) -> str:
    """The last error in a log: ours to its end, else one line of a traceback, else the last."""
    lines = text.strip().splitlines()
    for number, line in reversed(list(enumerate(lines))):
        if found := _ERROR.match(line):
            return "\n".join(lines[number:]) if found[2] == "error: " else line
    return lines[-1] if lines else ""


def _first(failures: "Mapping[int, ProcessFailure]", said: Mapping[int, _Said]) -> int:
    """The rank that failed first: the others lose it a moment later, or are ended by the agent.

    torch notes whole seconds. Within those: one that was killed, one that explains itself, the one
    that spoke first.
    """
    first = min(failure.timestamp for failure in failures.values())

    def order(rank: int) -> tuple[bool, bool, bool, bool, float]:
        code = failures[rank].exitcode
        late, explains = failures[rank].timestamp > first + 1, said[rank].error.startswith("error:")
        return late, code in STOPPED, code > 0, not explains, said[rank].at

    return min(failures, key=order)
