"""What must hold on every rank before the first step; ``samestep doctor`` shows it alone.

``check_this_rank`` yields what a rank finds by itself. ``compare`` and ``is_shared`` need the other
ranks.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import cache
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import NamedTuple

import lightning as L
import torch

from samestep.config_keys import KeyScope, scope_of
from samestep.errors import ConfigError, RunError
from samestep.ranks import environment, network, process_group
from samestep.ranks.process_group import broadcast, device_kind
from samestep.run_spec import RunSpec, check_shares, leaves

SHARED_MEMORY = Path("/dev/shm")  # where loader processes leave their batches
CONFIG_CHECKS = {"world size", "accelerator", "run directory", "shares"}  # exit code 2
NOT_SHARED = "run directory is not shared: nodes get checkpoints from rank zero"
BYTES_PER_PARAMETER = 3 * 4 * 3  # weights and two moments, 4 bytes each, in 3 checkpoint files


class PreflightError(RunError):
    """The surroundings are not fit for the run: one message, exit code 1."""


class Finding(NamedTuple):
    """What a check found, and what to do about it; an empty remedy means that all is well."""

    check: str
    fact: str
    remedy: str = ""

    @property
    def result(self) -> str:
        """``ok`` or ``failed``."""
        return "failed" if self.remedy else "ok"


def find_rank_zero(accelerator: str, timeout_s: float) -> str:
    """Wait until rank zero's node can be reached, ``timeout_s`` seconds at most.

    With several nodes, gloo and NCCL are told the interface that leads to rank zero, unless
    ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` is set. Returns what was found; nothing without
    torchrun.
    """
    # Without a GPU of its own, a rank could not even choose the device of its process group.
    is_alone = not environment.under_torchrun()
    needs_gpus = accelerator == "gpu" if is_alone else torch.cuda.is_available()
    if needs_gpus and (error := failure([check_accelerator(accelerator)])):
        raise error
    if is_alone:
        return ""
    name = environment.variable("MASTER_ADDR") or "localhost"
    try:
        address, own_address = network.wait_for(name, timeout_s)
    except network.NetworkError as error:
        raise PreflightError(f"rank {environment.rank()}: MASTER_ADDR={name}: {error}") from error
    interface = network.interface_with(own_address) if environment.num_nodes() > 1 else None
    if interface is None:
        return f"{name} is {address}"
    # NCCL takes eth1 for a prefix, which eth10 has too, unless an equals sign stands before it.
    chosen = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    for variable, value in chosen.items():
        if not environment.variable(variable):
            environment.set_variable(variable, value)
    return f"{name} is {address}, reached through {interface}"


def run(spec: RunSpec, model: L.LightningModule, datamodule: L.LightningDataModule | None) -> None:
    """Do all checks on all ranks; every rank must call this, and gets the same error."""
    findings = inspect(spec, model, datamodule)
    if environment.rank() == 0 and Finding("nodes", NOT_SHARED) in findings:
        print(f"Preflight: {NOT_SHARED}", flush=True)
    if error := failure(findings):
        raise error


def failure(findings: list[Finding]) -> ConfigError | PreflightError | None:
    """One error for all that failed: a ConfigError if the configuration alone is wrong."""
    failed = [finding for finding in findings if finding.remedy]
    if not failed:
        return None
    names = {finding.check for finding in failed}
    text = "\n".join(f"{check}: {fact}; {remedy}" for check, fact, remedy in failed)
    return ConfigError(text) if names <= CONFIG_CHECKS else PreflightError(text)


def inspect(
    spec: RunSpec,
    model: L.LightningModule,
    datamodule: L.LightningDataModule | None,
    *more: Finding,
) -> list[Finding]:
    """Do all checks, and gather the findings of all ranks: the same list on all of them.

    First comes what is well, then what is not and on which ranks. ``more`` are findings that this
    rank has made before.
    """
    mine = [*check_this_rank(spec, model, datamodule), *more]
    # One rank has nobody to differ from.
    is_alone = environment.world_size() == 1
    values = {} if is_alone else identity(spec) | hash_code(model, datamodule)
    try:
        everyone = process_group.gather((mine, values))
        shared = is_shared(spec.run_dir)
    except RuntimeError as error:  # of a collective
        raise PreflightError(
            f"rank {environment.rank()}: the other ranks do not answer ({error}); check their "
            "logs, then for a firewall, then set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        ) from error
    ranks: dict[Finding, list[str]] = {}
    for rank, (findings, values) in enumerate(everyone):
        for finding in [*findings, compare(values, everyone[0][1])]:
            if rank == 0 or finding.remedy:
                ranks.setdefault(finding, []).append(str(rank))
    faults = [
        finding._replace(fact=f"rank {', '.join(numbers)}: {finding.fact}")
        for finding, numbers in ranks.items()
        if finding.remedy
    ]
    if environment.num_nodes() > 1:
        ranks[Finding("nodes", "run directory is shared" if shared else NOT_SHARED)] = []
    # A check that failed on any rank is not listed as well.
    faulty = {finding.check for finding in faults}
    return [finding for finding in ranks if finding.check not in faulty] + faults


def check_this_rank(
    spec: RunSpec, model: L.LightningModule, datamodule: L.LightningDataModule | None
) -> Iterator[Finding]:
    """What this rank finds out without the others.

    The optional method ``shared_memory_bytes()`` of the DataModule says how many bytes the loader
    processes of one rank hold in ``/dev/shm``.
    """
    yield check_world_size(spec)
    yield check_accelerator(spec.accelerator)
    if not isinstance(spec.shares, str):  # equal, or measured
        fault = check_shares(spec.shares, environment.num_nodes(), environment.world_size())
        fact, _, remedy = (fault or f"cluster.shares={spec.shares}").partition("; ")
        yield Finding("shares", fact, remedy)
    shared_memory_bytes = getattr(datamodule, "shared_memory_bytes", lambda: 0)()
    if shared_memory_bytes and SHARED_MEMORY.exists():
        needed = shared_memory_bytes * environment.local_world_size()
        remedy = f"enlarge {SHARED_MEMORY} (docker --shm-size), or lower data.num_workers"
        yield check_room("shared memory", SHARED_MEMORY, needed, remedy)
    if environment.rank() == 0:
        yield check_run_directory(spec.run_dir, model)


def check_world_size(spec: RunSpec) -> Finding:
    """Whether torchrun has started as many ranks as the configuration says."""
    started, devices = environment.world_size(), spec.devices
    nodes = spec.num_nodes or environment.num_nodes()  # nodes may come and go
    fact = f"ranks: {started}, nodes: {environment.num_nodes()}"
    # The defaults, one device on one node, leave the number to torchrun.
    if not isinstance(devices, int) or devices * nodes in (1, started):
        return Finding("world size", fact)
    remedy = f"trainer.devices={devices} x trainer.num_nodes={nodes} must be that number, or 1"
    return Finding("world size", fact, remedy)


def check_accelerator(chosen: str) -> Finding:
    """Whether each rank of this node has a GPU of its own, if it should."""
    ranks = environment.local_world_size()
    gpus = torch.accelerator.device_count()
    fact = f"{device_kind(chosen)}, {gpus} GPUs and {ranks} ranks here"
    needs_gpus = chosen == "gpu" or (chosen == "auto" and gpus > 0)
    if gpus >= ranks or not needs_gpus:
        return Finding("accelerator", fact)
    remedy = (
        f"trainer.accelerator={chosen} takes one per rank: start fewer ranks, check the driver "
        "and the GPU limit, or set trainer.accelerator=cpu"
    )
    return Finding("accelerator", fact, remedy)


def check_run_directory(run_dir: Path, model: L.LightningModule) -> Finding:
    """Whether the run directory can be written, and has room for its checkpoints."""
    folder = run_dir / "checkpoints"
    remedy = "free some space or get permission there, or choose another place with run_root=..."
    try:
        place = next(path for path in (folder, *folder.parents) if path.exists())
        # Only a write shows a full disk or a quota.
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:
            file.write(b"preflight")
            os.fsync(file.fileno())
        replaced = sum(path.stat().st_size for path in folder.glob("*.ckpt"))
    except OSError as error:
        fact = f"run_dir={run_dir} cannot be written: {error.strerror}"
        return Finding("run directory", fact, remedy)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    needed = BYTES_PER_PARAMETER * num_parameters - replaced
    return check_room("run directory", place, needed, remedy)


def check_room(check: str, place: Path, needed: float, remedy: str) -> Finding:
    """Whether a directory has ``needed`` bytes left."""
    free = shutil.disk_usage(place).free
    fact = f"{free >> 20:,} MiB free in {place}, {ceil(max(0, needed) / 2**20):,} needed"
    return Finding(check, fact, remedy if free < needed else "")


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
    with ExitStack() as stack:
        token: tuple[int, str] | None = None
        if environment.rank() == 0:
            # Whether the directory can be written at all is another check.
            with suppress(OSError):
                level, place = next((i, path) for i, path in enumerate(folders) if path.is_dir())
                file = stack.enter_context(
                    tempfile.NamedTemporaryFile(dir=place, prefix=".samestep-")
                )
                token = level, Path(file.name).name
        token, below = broadcast((token, [path.name for path in folders]))
        if token is None:
            return True
        level, name = token
        # The names below the shared folder tell node-0/runs/mine from node-1/runs/mine.
        has_same_names = [path.name for path in folders[:level]] == below[:level]
        sees = has_same_names and (folders[level] / name).exists()
        return all(process_group.gather(sees))


def identity(spec: RunSpec) -> dict[str, str]:
    """What must be the same on all ranks, beside the code."""
    values = {"torch": torch.__version__, "device": device_kind(spec.accelerator)}
    for key, value in leaves(spec.config).items():
        if scope_of(key, spec.may_change) < KeyScope.PER_NODE:
            values[key] = value if isinstance(value, str) else json.dumps(value)
    return values


def hash_code(*parts: object) -> dict[str, str]:
    """A digest of each file of samestep, and of the packages that define ``parts``.

    Other installed packages are left out: they may be all of torch.
    """
    values = {}
    for name in {"samestep", *(type(part).__module__.partition(".")[0] for part in parts)}:
        module = sys.modules[name]
        # A script is one file: its folder may hold anything. What was typed has no file.
        places = getattr(module, "__path__", [getattr(module, "__file__", None)])
        for place in map(Path, filter(None, places)):
            if name != "samestep" and {"site-packages", "dist-packages"} & {*place.parts}:
                continue
            for path in place.rglob("*.py") if place.is_dir() else [place]:
                key = str(path.relative_to(place.parent))
                values[key] = sha256(path.read_bytes()).hexdigest()[:8]
    return values


def compare(values: dict[str, str], first: dict[str, str]) -> Finding:
    """How the identity of a rank differs from that of rank zero."""
    facts = [
        f"{key}={values.get(key)}, rank 0 has {first.get(key)}"
        for key in first | values
        if values.get(key) != first.get(key)
    ]
    if not facts:
        return Finding("sameness", "configuration, code, torch and kind of device")
    remedy = "start all ranks by one command, from one image or directory, on one kind of device"
    return Finding("sameness", f"{len(facts)} differences: {'; '.join(facts[:5])}", remedy)
