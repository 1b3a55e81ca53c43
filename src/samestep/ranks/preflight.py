"""What must hold on every rank before the first step; ``scripts/doctor.py`` shows it alone."""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from omegaconf import DictConfig
from torch import distributed as dist

from samestep.config.schema import leaves, show
from samestep.errors import ConfigError, RunError
from samestep.ranks import environment
from samestep.ranks.environment import interface_to
from samestep.ranks.process_group import device_kind
from samestep.run.directory import HARMLESS, resolved

SHM = Path("/dev/shm")  # where loader processes leave their batches
OF_CONFIG = {"world size", "accelerator", "run directory"}  # checks that fail with exit code 2


class PreflightError(RunError):
    """The surroundings are not fit for the run: one message, exit code 1."""


class Finding(NamedTuple):
    """What a check found, and what to do about it: nothing where all is well."""

    check: str
    fact: str
    remedy: str = ""

    @property
    def result(self) -> str:
        """ok, warning (it only costs time) or failed."""
        return "ok" if not self.remedy else "warning" if self.check == "threads" else "failed"


def before(cfg: DictConfig) -> str:
    """Find the node of rank zero; of several nodes, name gloo and NCCL the interface to it.

    A late name or network is waited for, ``cluster.timeout_s`` at most.

    Returns:
        What was found; nothing without torchrun.

    Raises:
        ConfigError: if this node has GPUs, but not one for each of its ranks.
        PreflightError: if there is no way to the node of rank zero.
    """
    if not environment.under_torchrun():
        return ""
    if torch.cuda.is_available() and (error := failure([accelerator(cfg)])):
        raise error  # the process group could not even choose its device
    name, interface = environment.variable("MASTER_ADDR"), None
    deadline = time.monotonic() + cfg.cluster.timeout_s
    while True:
        try:
            address = environment.address_of(name)
            if environment.num_nodes() > 1 and ":" not in address:
                interface = interface_to(address)
            break
        except OSError as why:
            if time.monotonic() + 1 > deadline:
                raise PreflightError(
                    f"rank {environment.rank()}: there is no way to MASTER_ADDR={name} after "
                    f"cluster.timeout_s={cfg.cluster.timeout_s} ({why.strerror}); check the "
                    "network, the pods' Service and subdomain, or start torchrun with "
                    "--master-addr=ADDRESS, with c10d rendezvous with --local-addr=ADDRESS"
                ) from why
            time.sleep(1)
    for variable, prefix in (("GLOO_SOCKET_IFNAME", ""), ("NCCL_SOCKET_IFNAME", "=")):
        if interface and not environment.variable(variable):
            environment.set_variable(variable, prefix + interface)  # =eth1 is not eth10
    return f"{name} is {address}" + (f", reached through {interface}" if interface else "")


def check(cfg: DictConfig, model: L.LightningModule) -> None:
    """Raise on all ranks the ``failure`` of any of them; log what is only slow."""
    findings = inspect(cfg, model)
    for finding in findings:
        if environment.rank() == 0 and finding.result == "warning":
            logging.getLogger(__name__).warning("%s: %s; %s", *finding)
    if error := failure(findings):
        raise error


def failure(findings: list[Finding]) -> ConfigError | PreflightError | None:
    """One error for all that failed: a ConfigError if the configuration alone is wrong."""
    failed = [finding for finding in findings if finding.result == "failed"]
    kind = ConfigError if {finding.check for finding in failed} <= OF_CONFIG else PreflightError
    return kind("\n".join("{}: {}; {}".format(*finding) for finding in failed)) if failed else None


def inspect(cfg: DictConfig, model: L.LightningModule, *more: Finding) -> list[Finding]:
    """What all ranks find, and ``more`` that this one has found: on all of them the same list.

    Raises:
        PreflightError: if a rank does not answer before the process group gives up.
    """
    mine = ([*found_here(cfg, model), *more], identity(cfg))
    everyone: list[Any] = [mine] * environment.world_size()
    ranks: dict[Finding, list[str]] = {}
    try:
        if dist.is_initialized():
            dist.all_gather_object(everyone, mine)
        for rank, (findings, values) in enumerate(everyone):
            for finding in [*findings, compared(values, everyone[0][1])]:
                if rank == 0 or finding.remedy:
                    ranks.setdefault(finding, []).append(str(rank))
        amiss = [
            finding._replace(fact=f"rank {', '.join(numbers)}: {finding.fact}")
            for finding, numbers in ranks.items()
            if finding.remedy
        ]
        well = [finding for finding in ranks if finding.check not in {bad.check for bad in amiss}]
        if dist.is_initialized() and not failure(amiss):
            well.append(network(device_kind(cfg)))
    except RuntimeError as error:  # of a collective
        raise PreflightError(
            f"rank {environment.rank()}: the other ranks do not answer ({error}); see their logs, "
            "then look for a firewall, then set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        ) from error
    return well + amiss


def found_here(cfg: DictConfig, model: L.LightningModule) -> Iterator[Finding]:
    """What this rank can tell without the others."""
    size, devices, nodes = environment.world_size(), cfg.trainer.devices, cfg.trainer.num_nodes
    if "max_nodes" in cfg.cluster:  # cluster=elastic: whoever is there
        nodes = environment.num_nodes()
    wanted = size if devices == "auto" or devices * nodes == 1 else devices * nodes
    remedy = f"trainer.devices={devices} x trainer.num_nodes={nodes} must be that number, or 1"
    fact = f"ranks: {size}, nodes: {environment.num_nodes()}"
    yield Finding("world size", fact, remedy if wanted != size else "")
    yield accelerator(cfg)
    threads, processors = torch.get_num_threads(), environment.cpus_per_rank()
    remedy = "they wait for each other: unset OMP_NUM_THREADS" if threads > processors else ""
    yield Finding("threads", f"{threads} per rank, of {processors} processors", remedy)
    if cfg.data.num_workers and SHM.exists():
        images = max(cfg.data.global_batch_size, cfg.data.eval_batch_size) / size
        batch = images * cfg.data.num_channels * cfg.data.image_size**2  # bytes
        needed = 2 * batch * cfg.data.num_workers * environment.local_world_size()
        remedy = f"give {SHM} more room (docker --shm-size), or lower data.num_workers"
        yield room("shared memory", SHM, needed, remedy)
    if environment.rank() == 0:
        folder = Path(cfg.run_dir, "checkpoints")
        remedy = "make room or get permission there, or choose another place with run_root=..."
        needed = 9 * 4 * sum(p.numel() for p in model.parameters())  # 3 files; weights, 2 moments
        try:
            place = next(path for path in (folder, *folder.parents) if path.exists())
            with tempfile.TemporaryFile(dir=place, buffering=0) as file:
                file.write(b"preflight")
                os.fsync(file.fileno())
            needed -= sum(path.stat().st_size for path in folder.glob("*.ckpt"))
            yield room("run directory", place, needed, remedy)
        except OSError as error:
            fact = f"run_dir={cfg.run_dir} cannot be written: {error.strerror}"
            yield Finding("run directory", fact, remedy)


def room(check: str, place: Path, needed: float, remedy: str) -> Finding:
    """Whether a directory has so many bytes left."""
    free = shutil.disk_usage(place).free
    fact = f"{free >> 20:,} MiB free in {place}, {ceil(max(0, needed) / 2**20):,} needed"
    return Finding(check, fact, remedy if free < needed else "")


def accelerator(cfg: DictConfig) -> Finding:
    """Whether each rank of this node has a GPU of its own, if it should."""
    chosen, ranks = cfg.trainer.accelerator, environment.local_world_size()
    gpus = torch.accelerator.device_count()
    too_few = gpus < ranks and (chosen == "gpu" or (chosen == "auto" and gpus > 0))
    remedy = f"trainer.accelerator={chosen} takes one per rank: start fewer ranks, look at the "
    remedy = remedy + "driver and the GPU limit, or set trainer.accelerator=cpu" if too_few else ""
    return Finding("accelerator", f"{device_kind(cfg)}, {gpus} GPUs and {ranks} ranks here", remedy)


def identity(cfg: DictConfig) -> dict[str, str]:
    """What must be the same on all ranks: configuration, code, torch and kind of device."""
    values = {"torch": torch.__version__, "device": device_kind(cfg)}
    for key, value in leaves(resolved(cfg)).items():
        if not HARMLESS.fullmatch(key) or key.startswith(("trainer.max_", "trainer.strategy")):
            values[key] = show(value)
    code = Path(__file__).parents[2]  # src
    for path in code.rglob("*.py"):
        values[f"src/{path.relative_to(code)}"] = sha256(path.read_bytes()).hexdigest()[:8]
    return values


def compared(values: dict[str, str], first: dict[str, str]) -> Finding:
    """How the identity of a rank differs from that of rank zero."""
    facts = [
        f"{key}={values.get(key)}, rank 0 has {first.get(key)}"
        for key in first | values
        if values.get(key) != first.get(key)
    ]
    remedy = "start all ranks by one command, from one image or directory, on one kind of device"
    if not facts:
        return Finding("sameness", "configuration, code, torch and kind of device")
    return Finding("sameness", f"{len(facts)} differences: {'; '.join(facts[:5])}", remedy)


def network(device: str) -> Finding:
    """All-reduce one number, and 4 MiB, a few times each; the fastest counts."""
    fastest = []
    for size in (1, 2**20):
        tensor, times = torch.zeros(size, device=device), []
        for _ in range(5):
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            tensor[0].item()  # waits for a GPU
            times.append(time.perf_counter() - begin)
        fastest.append(min(times))
    speed = f"{1000 * fastest[0]:.2f} ms, {4 * 2**20 / fastest[1] / 1e6:,.0f} MB/s"
    return Finding("network", f"{'NCCL' if device == 'cuda' else 'gloo'}, {speed}")
