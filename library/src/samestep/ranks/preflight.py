"""What must hold on every rank before the first step; ``samestep doctor`` shows only this.

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
from torch.nn.parameter import is_lazy

from samestep.config_keys import KeyScope, scope_of
from samestep.errors import ConfigError, RunError, remedy_of
from samestep.option_names import option, setting
from samestep.ranks import environment, network, process_group
from samestep.ranks.process_group import broadcast, device_kind
from samestep.run_spec import RunSpec, check_shares, leaves

INSTALLED = {"site-packages", "dist-packages"}  # folders of packages that pip has installed
CONFIG_CHECKS = {
    "world size",
    "accelerator",
    "run directory",
    "shares",
    "lazy layers",
}  # exit code 2
NOT_SHARED = "run directory is not shared: nodes get checkpoints from rank zero"
BYTES_PER_PARAMETER = 3 * 4 * 3  # weights and two moments, 4 bytes each, in 3 checkpoint files


class PreflightError(RunError):
    """The machine or the network cannot run this: one message, exit code 1."""


class Finding(NamedTuple):
    """What a check found, and what to do about it; the remedy is empty if nothing is wrong."""

    check: str
    fact: str
    remedy: str = ""

    @property
    def result(self) -> str:
        """``ok`` or ``failed``."""
        return "failed" if self.remedy else "ok"


def find_rank_zero(accelerator: str, timeout_s: float) -> str:
    """Wait until rank zero's node can be reached, ``timeout_s`` seconds at most.

    With several nodes, gloo and NCCL use the interface that leads to rank zero, unless
    ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` is set. Returns what was found; an empty text
    without torchrun.
    """
    check_gpus(accelerator)
    if not environment.under_torchrun():
        return ""
    network.check_chosen_interfaces(uses_nccl=torch.cuda.is_available() and accelerator != "cpu")
    name = environment.variable("MASTER_ADDR") or "localhost"
    try:
        address, own_address = network.wait_for(name, timeout_s)
    except network.NetworkError as error:
        raise PreflightError(f"rank {environment.rank()}: MASTER_ADDR={name}: {error}") from error
    interface = None
    if environment.num_nodes() > 1:
        interface = network.interface_with(own_address)
    if interface is None:
        return f"{name} is {address}"
    choose_interface(interface)
    return f"{name} is {address}, reached through {interface}"


def check_gpus(accelerator: str) -> None:
    """Raise an error if this rank needs a GPU to meet the other ranks, and has none of its own."""
    needs_gpus = accelerator == "gpu"
    if environment.under_torchrun():
        # Without a GPU of its own, a rank could not even choose the device of its process group.
        needs_gpus = torch.cuda.is_available()
    if not needs_gpus:
        return
    raise_failures([check_accelerator(accelerator)])


def choose_interface(interface: str) -> None:
    """Tell gloo and NCCL which interface to use; on their own they may take one of a container."""
    # NCCL takes eth1 for a prefix, which eth10 has too, unless an equals sign stands before it.
    chosen = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    for variable, value in chosen.items():
        if not environment.variable(variable):
            environment.set_variable(variable, value)


def run(spec: RunSpec, model: L.LightningModule, datamodule: L.LightningDataModule | None) -> None:
    """Do all checks on all ranks; every rank must call this, and gets the same error."""
    findings = inspect(spec, model, datamodule)
    if environment.rank() == 0 and Finding("nodes", NOT_SHARED) in findings:
        print(f"Preflight: {NOT_SHARED}", flush=True)
    raise_failures(findings)


def raise_failures(findings: list[Finding]) -> None:
    """Raise one error for all checks that failed, if any did."""
    error = failure(findings)
    if error is not None:
        raise error


def failure(findings: list[Finding]) -> ConfigError | PreflightError | None:
    """Build one error of all checks that failed; None if none did."""
    lines: list[str] = []
    names: set[str] = set()
    for check, fact, remedy in findings:
        if remedy:
            lines.append(f"{check}: {fact}; {remedy}")
            names.add(check)
    if not lines:
        return None
    # If only the configuration is wrong, trying the same command again cannot help.
    if names <= CONFIG_CHECKS:
        return ConfigError("\n".join(lines))
    return PreflightError("\n".join(lines))


def inspect(
    spec: RunSpec,
    model: L.LightningModule,
    datamodule: L.LightningDataModule | None,
    *more: Finding,
) -> list[Finding]:
    """Do all checks, and gather the findings of all ranks: the same list on all of them.

    First come the checks that succeeded, then those that failed and on which ranks. ``more`` are
    findings that this rank has made before.
    """
    mine = [*check_this_rank(spec, model), *more]
    values: dict[str, str] = {}
    # One rank has no other rank to differ from, and hashing the code takes a moment.
    if environment.world_size() > 1:
        values = identity(spec) | hash_code(model, datamodule)
    try:
        everyone = process_group.gather((mine, values))
        shared = is_shared(spec.run_dir)
    except RuntimeError as error:  # of a collective
        raise PreflightError(
            f"rank {environment.rank()}: the other ranks do not answer ({error}); check their "
            "logs, then for a firewall, then set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        ) from error
    good, faults = merge(everyone)
    if environment.num_nodes() > 1:
        good.append(Finding("nodes", "run directory is shared" if shared else NOT_SHARED))
    return good + faults


def merge(
    everyone: list[tuple[list[Finding], dict[str, str]]],
) -> tuple[list[Finding], list[Finding]]:
    """Merge the findings of all ranks: rank zero's checks that succeeded, and all that failed.

    Args:
        everyone: by rank, its findings and what must be the same on all ranks.
    """
    _, values_of_rank_zero = everyone[0]
    good: list[Finding] = []
    ranks: dict[Finding, list[str]] = {}  # which have found the same fault
    for rank, (findings, values) in enumerate(everyone):
        for finding in [*findings, compare(values, values_of_rank_zero)]:
            if finding.remedy:
                ranks.setdefault(finding, []).append(str(rank))
            elif rank == 0:
                good.append(finding)
    faults = []
    for finding, numbers in ranks.items():
        fact = f"rank {', '.join(numbers)}: {finding.fact}"
        faults.append(finding._replace(fact=fact))
    # A check that failed on any rank is not listed as well.
    faulty = {finding.check for finding in faults}
    return [finding for finding in good if finding.check not in faulty], faults


def check_this_rank(spec: RunSpec, model: L.LightningModule) -> Iterator[Finding]:
    """Yield what this rank finds without the others."""
    yield check_world_size(spec)
    yield check_accelerator(spec.accelerator)
    # A text is "equal" or "auto", which fits any number of ranks.
    if not isinstance(spec.shares, str):
        fault = check_shares(spec.shares, environment.num_nodes(), environment.world_size())
        fact, _, remedy = (fault or setting("shares", spec.shares)).partition("; ")
        yield Finding("shares", fact, remedy)
    yield from check_lazy_layers(model)
    # The other ranks of a node write nothing there, and other nodes may not have it.
    if environment.rank() == 0:
        yield check_run_directory(spec.run_dir, model)


def check_world_size(spec: RunSpec) -> Finding:
    """Whether torchrun has started as many ranks as the configuration says."""
    started, devices = environment.world_size(), spec.devices
    # Where nodes come and go, the configuration has no number of them.
    nodes = spec.num_nodes or environment.num_nodes()
    fact = f"ranks: {started}, nodes: {environment.num_nodes()}"
    if not isinstance(devices, int):
        return Finding("world size", fact)  # "auto" is what torchrun has started
    # The defaults, one device on one node, leave the number to torchrun.
    if devices * nodes in (1, started):
        return Finding("world size", fact)
    remedy = (
        f"{setting('devices', devices)} x {setting('num_nodes', nodes)} must be that number, or 1"
    )
    return Finding("world size", fact, remedy)


def check_accelerator(chosen: str) -> Finding:
    """Whether each rank of this node has a GPU of its own, if it should."""
    ranks = environment.local_world_size()
    gpus = torch.accelerator.device_count()
    fact = f"{device_kind(chosen)}; GPUs: {gpus}, ranks: {ranks} here"
    needs_gpus = chosen == "gpu"
    # Lightning would use the GPUs, and two ranks on one GPU hang in NCCL.
    if chosen == "auto" and gpus > 0:
        needs_gpus = True
    if gpus >= ranks or not needs_gpus:
        return Finding("accelerator", fact)
    remedy = f"check the driver and the GPU limit, or set {setting('accelerator', 'cpu')}"
    if gpus:
        remedy = f"start fewer ranks, {remedy}"
    remedy = f"{setting('accelerator', chosen)} takes one GPU per rank: {remedy}"
    return Finding("accelerator", fact, remedy)


def check_lazy_layers(model: L.LightningModule) -> Iterator[Finding]:
    """Yield a fault if parameters have no shape yet, and several ranks must have the same ones."""
    if environment.world_size() == 1:
        return
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        yield Finding(
            "lazy layers",
            f"{', '.join(lazy[:3])} has no shape before its first batch",
            "call the model once with an example batch before fit, or give its layers their sizes",
        )


def check_run_directory(run_dir: Path, model: L.LightningModule) -> Finding:
    """Whether the run directory can be written, and has room for its checkpoints."""
    folder = run_dir / "checkpoints"
    name = option("run_dir")
    elsewhere = f"or choose another place with {name}=..."
    try:
        # The directory itself is made later, once all checks have succeeded.
        place = next(path for path in (folder, *folder.parents) if path.exists())
        # Only a write shows a full disk or a quota.
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:
            file.write(b"preflight")
            os.fsync(file.fileno())
        # A run that resumes replaces its checkpoints, which need no room in addition.
        replaced = sum(path.stat().st_size for path in folder.glob("*.ckpt"))
    except OSError as error:
        fact = f"run_dir={run_dir} cannot be written: {error.strerror}"
        return Finding("run directory", fact, f"{remedy_of(error)}, {elsewhere}")
    num_parameters = 0
    for parameter in model.parameters():
        # A lazy layer has no size before its first batch.
        if not is_lazy(parameter):
            num_parameters += parameter.numel()
    needed = BYTES_PER_PARAMETER * num_parameters - replaced
    return check_room("run directory", place, needed, f"free some space, {elsewhere}")


def check_room(check: str, place: Path, needed: float, remedy: str) -> Finding:
    """Whether a directory has ``needed`` bytes left."""
    free = shutil.disk_usage(place).free
    needed_mib = ceil(max(0, needed) / 2**20)
    fact = f"{free >> 20:,} MiB free in {place}, {needed_mib:,} needed"
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


def identity(spec: RunSpec) -> dict[str, str]:
    """What must be the same on all ranks, beside the code."""
    values = {"torch": torch.__version__, "device": device_kind(spec.accelerator)}
    for key, value in leaves(spec.config).items():
        if scope_of(key) < KeyScope.PER_NODE:
            values[key] = value if isinstance(value, str) else json.dumps(value)
    return values


def hash_code(*parts: object) -> dict[str, str]:
    """A digest of each file of samestep, and of the packages that define ``parts``.

    Other installed packages are left out: they may be all of torch.
    """
    packages = {"samestep"}
    for part in parts:
        packages.add(type(part).__module__.partition(".")[0])
    values = {}
    for package in packages:
        for place in find_sources(package):
            # A script is one file: its folder may hold anything.
            files = place.rglob("*.py") if place.is_dir() else [place]
            for path in files:
                key = str(path.relative_to(place.parent))
                # An editor marks a changed file by a link to nowhere, .#model.py.
                with suppress(OSError):
                    values[key] = sha256(path.read_bytes()).hexdigest()[:8]
    return values


def find_sources(package: str) -> Iterator[Path]:
    """Yield the folders or the file of a package that is ours or the user's."""
    module = sys.modules[package]
    # What was typed into Python has no file.
    places = getattr(module, "__path__", [getattr(module, "__file__", None)])
    for place in filter(None, places):
        path = Path(place)
        is_installed = not INSTALLED.isdisjoint(path.parts)
        if package == "samestep" or not is_installed:
            yield path


def compare(values: dict[str, str], first: dict[str, str]) -> Finding:
    """Compare the identity of a rank with that of rank zero."""
    facts = []
    for key in first | values:
        if values.get(key) != first.get(key):
            facts.append(f"{key}={values.get(key)}, rank 0 has {first.get(key)}")
    if not facts:
        return Finding("sameness", "configuration, code, torch and kind of device")
    remedy = "start all ranks by one command, from one image or directory, on one kind of device"
    # Of a wrong image every file differs.
    return Finding("sameness", f"{len(facts)} differences: {'; '.join(facts[:5])}", remedy)
