"""How this rank finds rank zero, and whether their nodes see the same files."""

import tempfile
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

from samestep.errors import RunError
from samestep.ranks import environment, network, process_group
from samestep.ranks.process_group import broadcast


class MachineError(RunError):
    """The machine or the network cannot run this: one message, exit code 1."""


def find_rank_zero(timeout_s: float) -> str:
    """Wait until rank zero's node can be reached, ``timeout_s`` seconds at most.

    With several nodes, gloo and NCCL use the interface that leads to rank zero, unless
    ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` is set. Returns what was found; an empty text
    without torchrun.
    """
    if not environment.under_torchrun():
        return ""
    name = environment.variable("MASTER_ADDR") or "localhost"
    try:
        address, own_address = network.wait_for(name, timeout_s)
    except network.NetworkError as error:
        raise MachineError(f"rank {environment.rank()}: MASTER_ADDR={name}: {error}") from error
    interface = None
    if environment.num_nodes() > 1:
        interface = network.interface_with(own_address)
    if interface is None:
        return f"{name} is {address}"
    choose_interface(interface)
    return f"{name} is {address}, reached through {interface}"


def choose_interface(interface: str) -> None:
    """Tell gloo and NCCL which interface to use; on their own they may take one of a container."""
    # NCCL takes eth1 for a prefix, which eth10 has too, unless an equals sign stands before it.
    chosen = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    for variable, value in chosen.items():
        if not environment.variable(variable):
            environment.set_variable(variable, value)


@cache
def is_shared(run_dir: Path) -> bool:
    """Whether all nodes see the run directory that rank zero writes; every rank must call this.

    Rank zero makes a hidden file in the run directory, or in the nearest folder above it that
    exists. The other ranks look for it in the same place. The file is gone afterwards. This is
    done once in a process.
    """
    if environment.num_nodes() == 1:
        return True
    folders = [run_dir.absolute(), *run_dir.absolute().parents]
    names = [path.name for path in folders]
    with ExitStack() as stack:
        token: tuple[int, str] | None = None
        if environment.rank() == 0:
            # Whether the directory can be written at all is another check.
            with suppress(OSError):
                level, place = find_existing(folders)
                file = stack.enter_context(
                    tempfile.NamedTemporaryFile(dir=place, prefix=".samestep-")
                )
                token = level, Path(file.name).name
        token, names_of_rank_zero = broadcast((token, names))
        if token is None:
            return True
        level, name = token
        # The names below the shared folder tell node-0/runs/mine from node-1/runs/mine.
        has_same_names = names[:level] == names_of_rank_zero[:level]
        sees = has_same_names and (folders[level] / name).exists()
        return all(process_group.gather(sees))


def find_existing(folders: list[Path]) -> tuple[int, Path]:
    """Return the first folder that exists, and its place in the list before it."""
    for level, path in enumerate(folders):
        if path.is_dir():
            return level, path
    raise AssertionError("the root of the file system exists")
