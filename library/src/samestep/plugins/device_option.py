"""What ``devices`` means: how many processes, or which GPUs; as Lightning reads it.

::

    2, "2"             so many processes, each with a GPU of its own if there are any
    "auto"             one for each GPU; one on CPUs
    -1, "-1"           one for each GPU
    [1, 3], "1,3"      one for each of these GPUs, "1," for one; on CPUs there is nothing to name
"""

import re
from collections.abc import Sequence
from typing import Any

from samestep.errors import ConfigError
from samestep.option_names import setting
from samestep.ranks import environment

ALL = -1
GPUS = ("gpu", "cuda", "mps")  # accelerators with this meaning; a Mac has one GPU
VISIBLE = "CUDA_VISIBLE_DEVICES"
NUMBER = re.compile(r"-1|0*[1-9]\d*")  # of processes, or -1
NUMBERS = re.compile(r"(\d+,)+\d*")  # of GPUs
RULE = 'must be a number of processes, "auto", -1 for all GPUs, or a list of GPUs such as [0, 1]'


def read(devices: Any) -> int | str | list[int]:
    """The argument in its simplest form: a number, ``auto``, or a list of GPUs.

    Raises:
        ConfigError: if it is none of these.
    """
    text = to_text(devices)
    if text == "auto":
        return text
    if NUMBER.fullmatch(text):
        return int(text)
    if NUMBERS.fullmatch(text):
        named = [int(number) for number in text.rstrip(",").split(",")]
        if len({*named}) == len(named):
            return named
    raise ConfigError(f"{setting('devices', devices)}: {RULE}")


def to_text(devices: Any) -> str:
    """The argument as it is typed: ``[1, 3]`` is ``1,3,``."""
    # Hydra passes a ListConfig, which is a sequence and no list.
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        return "".join(f"{number}," for number in devices)
    return str(devices).replace(" ", "")


def count(accelerator: str, devices: Any) -> int:
    """How many processes this machine must start for these arguments of the Trainer.

    Raises:
        ConfigError: if it has no such GPUs.
    """
    wanted = read(devices)
    if wanted == 1:
        return 1
    gpus = num_gpus(accelerator)
    if wanted == "auto":
        return max(1, gpus)
    text = setting("devices", devices)
    if isinstance(wanted, list):
        check_list(wanted, accelerator, gpus, text)
        return len(wanted)
    assert isinstance(wanted, int)
    if wanted != ALL:
        check_number(wanted, accelerator, gpus, text)
        return wanted
    if gpus == 0:
        raise ConfigError(
            f"{text}: means all GPUs, and there are none here; give a number of processes"
        )
    return gpus


def check_number(wanted: int, accelerator: str, gpus: int, text: str) -> None:
    """Raise a ConfigError, which begins with ``text``, if there are fewer GPUs than processes."""
    needs_gpus = gpus > 0 or accelerator in GPUS
    if needs_gpus and wanted > gpus:
        raise ConfigError(
            f"{text}: this machine has {gpus} GPUs; choose fewer, or "
            f"{setting('accelerator', 'cpu')}"
        )


def check_list(named: Sequence[int], accelerator: str, gpus: int, text: str) -> None:
    """Raise a ConfigError, which begins with ``text``, if a number names none of the GPUs."""
    if accelerator not in ("auto", "cpu", *GPUS) and len(named) == 1:
        # Lightning knows other devices by numbers too, such as a TPU.
        return
    if gpus == 0 and accelerator not in GPUS:
        raise ConfigError(f"{text}: names GPUs, and this run is on CPUs; give a number")
    if max(named) >= gpus:
        raise ConfigError(
            f"{text}: this machine has {gpus} GPUs, counted from 0; choose others, or make "
            f"them visible in {VISIBLE}"
        )


def num_gpus(accelerator: str) -> int:
    """How many GPUs of this machine the run may use."""
    if accelerator not in ("auto", *GPUS):
        return 0
    # They take seconds, which a run on CPUs is spared.
    import torch

    from samestep.ranks import devices

    if accelerator != "cuda" and devices.has_mps():
        return 1
    return 0 if accelerator == "mps" else torch.cuda.device_count()


def expected(devices: Any) -> int | str:
    """How many processes a node must have; ``auto`` where that depends on its GPUs."""
    wanted = read(devices)
    if isinstance(wanted, list):
        return len(wanted)
    return "auto" if wanted == ALL else wanted


def name_to_ranks(devices: Any) -> None:
    """Let the ranks that are started from here see the GPUs that ``devices`` names, and no others.

    Rank 0 gets the first of them. Their numbers count the GPUs that this process sees, which may
    have names, such as UUIDs.
    """
    wanted = read(devices)
    if not isinstance(wanted, list):
        return
    all_of_machine = ",".join(map(str, range(max(wanted) + 1)))
    visible = (environment.variable(VISIBLE) or all_of_machine).split(",")
    environment.set_variable(VISIBLE, ",".join(visible[number].strip() for number in wanted))


def check_named(devices: Any) -> None:
    """Check a rank that something else has started, such as torchrun, which knows no ``devices``.

    Raises:
        ConfigError: if other GPUs are named than those that such ranks take.
    """
    wanted = read(devices)
    if isinstance(wanted, list) and sorted(wanted) != [*range(len(wanted))]:
        names = ",".join(str(number) for number in wanted)
        raise ConfigError(
            f"{setting('devices', devices)}: these ranks were not started by the Trainer, and take "
            f"the first GPUs that they see; start them with {VISIBLE}={names}"
        )
