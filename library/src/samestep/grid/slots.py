"""Places for the jobs that run at the same time: processors and GPUs, shared out among them."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from samestep.errors import ConfigError
from samestep.grid.job_process import claim, is_running
from samestep.ranks import environment

THREADS = "OMP_NUM_THREADS"
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Slot:
    """One place on this machine for one job at a time, whichever driver has started it.

    Args:
        folder: of the slots of a grid.
        number: of the slot.
        logs: folder with the logs of the jobs.
        variables: what a job in this slot gets.
    """

    def __init__(self, folder: Path, number: int, logs: Path, variables: dict[str, str]) -> None:
        # Other machines that share the folder have places of their own.
        self.path = folder / f"{platform.node()}-{number}"
        self.logs = logs
        self.variables = variables
        self.file: IO[bytes] | None = None

    def take(self) -> bool:
        """Take this place, and return whether that was possible."""
        file = claim(self.path)
        if file is None:
            return False  # another driver has a job here
        file.seek(0)
        last = file.read().decode()
        # The lock of a killed driver is gone, and its job may still use the GPUs of this place.
        if last and is_running(self.logs / f"{last}.log"):
            file.close()
            return False
        self.file = file
        return True

    def note(self, run_id: str) -> None:
        """Write which job is here, for drivers after this one."""
        assert self.file
        os.ftruncate(self.file.fileno(), 0)
        os.write(self.file.fileno(), run_id.encode())

    def release(self) -> None:
        """Leave this place to another job."""
        if self.file:
            self.file.close()
        self.file = None


def share_gpus(option: str, at_once: int, needed: int) -> list[str | None]:
    """The GPUs of each job that runs at the same time, such as ``["0,1", "2,3"]``; None without.

    Args:
        option: the name of ``at_once``, for the message.
        at_once: jobs at the same time.
        needed: GPUs of a job.

    Raises:
        ConfigError: if there are too few.
    """
    gpus = visible_gpus()
    if not gpus:
        return [None] * at_once
    num = len(gpus) // at_once
    if num < needed:
        raise ConfigError(
            f"{option}={at_once}: the {len(gpus)} GPUs here are enough for "
            f"{len(gpus) // needed}; choose that, or trainer.accelerator=cpu"
        )
    return [",".join(gpus[first : first + num]) for first in range(0, at_once * num, num)]


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as in ``CUDA_VISIBLE_DEVICES``."""
    # Not only their number: the variable may name other GPUs than the first ones.
    if visible := environment.variable(VISIBLE):
        return visible.split(",")
    import torch  # it takes seconds, and jobs on CPUs do not need it

    return list(map(str, range(torch.cuda.device_count())))


def variables_of(gpus: Sequence[str | None], ranks: int) -> list[dict[str, str]]:
    """What a job in each place gets: its GPUs, and how many processors each of its ranks uses."""
    shares = []
    num_threads = max(1, environment.cpus_per_rank() // (len(gpus) * ranks))
    for names in gpus:
        variables = {}
        # A single job has the machine to itself, as a run that was started by hand.
        if len(gpus) > 1 and environment.variable(THREADS) is None:
            variables[THREADS] = str(num_threads)
        if names is not None:
            variables[VISIBLE] = names
        shares.append(variables)
    return shares
