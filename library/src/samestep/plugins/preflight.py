"""What must hold on every rank before the first step; ``samestep doctor`` shows only this.

``before_meeting`` looks at what a rank needs to meet the others. ``check_this_rank`` yields what a
rank finds by itself, ``compare`` needs the others.
"""

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import NamedTuple

import lightning as L
import torch
from torch.nn.parameter import is_lazy

from samestep.config_keys import KeyScope, scope_of
from samestep.errors import ConfigError, remedy_of
from samestep.option_names import option, setting
from samestep.plugins import device_option
from samestep.ranks import environment, process_group
from samestep.ranks.meeting import MachineError, is_shared
from samestep.ranks.network import ipv4_address
from samestep.ranks.process_group import device_kind
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


class Finding(NamedTuple):
    """What a check found, and what to do about it; the remedy is empty if nothing is wrong."""

    check: str
    fact: str
    remedy: str = ""

    @property
    def result(self) -> str:
        """``ok`` or ``failed``."""
        return "failed" if self.remedy else "ok"


def before_meeting(accelerator: str) -> None:
    """Find what would keep this rank from meeting the others, or end it without a reason.

    Raises:
        ConfigError: with the first that is found.
    """
    check_gpus(accelerator)
    if environment.under_torchrun():
        check_chosen_interfaces(uses_nccl=torch.cuda.is_available() and accelerator != "cpu")


def check_gpus(accelerator: str) -> None:
    """Raise an error if this rank needs a GPU to meet the other ranks, and has none of its own."""
    needs_gpus = accelerator == "gpu"
    if environment.under_torchrun():
        # Without a GPU of its own, a rank could not even choose the device of its process group.
        needs_gpus = torch.cuda.is_available()
    if not needs_gpus:
        return
    raise_failures([check_accelerator(accelerator)])


def before_run(
    spec: RunSpec, model: L.LightningModule, datamodule: L.LightningDataModule | None
) -> None:
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


def failure(findings: list[Finding]) -> ConfigError | MachineError | None:
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
    return MachineError("\n".join(lines))


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
        raise MachineError(
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
    started, devices = environment.world_size(), device_option.expected(spec.devices)
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


# -- Interfaces of the network ---------------------------------------------------------------------


def check_chosen_interfaces(*, uses_nccl: bool) -> None:
    """Check the interfaces that the environment chooses for gloo and NCCL.

    gloo only says that it found no address for a name, and NCCL that it found no interface.

    Raises:
        ConfigError: if this machine does not have one of them.
    """
    existing = interfaces()
    for_gloo = environment.variable("GLOO_SOCKET_IFNAME")
    # gloo needs all of a list.
    if for_gloo and not set(existing).issuperset(for_gloo.split(",")):
        raise no_such_interface("GLOO_SOCKET_IFNAME", for_gloo, existing)
    for_nccl = environment.variable("NCCL_SOCKET_IFNAME")
    if not for_nccl or not uses_nccl:
        return
    if not any(nccl_takes(name, for_nccl) for name in existing):
        raise no_such_interface("NCCL_SOCKET_IFNAME", for_nccl, existing)


def no_such_interface(variable: str, given: str, existing: list[str]) -> ConfigError:
    """The error for a variable of the environment, perhaps of another machine or container."""
    return ConfigError(
        f"{variable}={given}: names no network interface of {socket.gethostname()}, which has "
        f"{', '.join(existing)}; unset the variable, or name one of these"
    )


def nccl_takes(name: str, given: str) -> bool:
    """Whether NCCL takes this interface: a list has prefixes, `=` names, or what `^` excludes."""
    patterns = given.lstrip("^=").split(",")
    is_named = name in patterns
    if "=" not in given[:2]:
        is_named = name.startswith(tuple(patterns))
    return is_named != given.startswith("^")


def interfaces() -> list[str]:
    """The names of the interfaces that have an address; of all where addresses are not known."""
    # One line for each address, with the name at its end.
    of_ipv6 = Path("/proc/net/if_inet6")
    lines = of_ipv6.read_text().splitlines() if of_ipv6.exists() else []
    names = {line.split()[-1] for line in lines}
    existing = [name for _, name in socket.if_nameindex()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in existing:
            if ipv4_address(probe, name):
                names.add(name)
    # Other systems than Linux do not answer, and lo0 of macOS must not be rejected for that.
    return sorted(names or existing)
