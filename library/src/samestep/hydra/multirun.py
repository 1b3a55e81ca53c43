"""Grids: ``python train.py -m`` trains a run for each combination of values. Imports no torch.

Each run is started as ``RUN_ID=<grid>-<values> python train.py <overrides>``, so whatever is true
for a run that was started by hand is true for it.
"""

import hashlib
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from samestep.errors import ConfigError, RunError
from samestep.grid import slots
from samestep.grid.driver import Driver, Grid, describe_full
from samestep.grid.jobs import FOLDER, Job
from samestep.hydra.compose import check, check_all, compose_unchecked, expand_grid, message_of
from samestep.hydra.front_end import topology_of
from samestep.hydra.overrides import GridRun, parse
from samestep.hydra.project import VARIABLE, project_folder
from samestep.hydra.rules import NAME
from samestep.plugins import starting
from samestep.ranks import environment

PREFIX = "grid."
LOCAL = "local"
SUBMIT, FOLLOW = ["-m", "samestep", "launch"], ["-m", "samestep.sweep.cluster_job"]
MAX_NAME = 63
ANY_RUN = "any-run-of-the-grid"
OWN_OF_HYDRA = ("hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweeper", "hydra.sweep")
PLACES_ON_CLUSTER = 16  # processes here that wait for the cluster
NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)(e-?\d+)?")
WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass
class Keys:
    """The keys of a grid, typed as ``grid.jobs=4``."""

    jobs: int | None = None
    """Runs that train at the same time; None: one, and on a cluster that is waited for, 16."""
    stop_on_failure: bool = False
    wait: bool = False
    """On a cluster: follow the runs to their ends, instead of only submitting them."""


def main(lines: Sequence[str]) -> int:
    """Train or continue a grid, print how to go on, and return the exit code.

    Raises:
        ConfigError: if one of its runs cannot be trained.
        RunError: if its folder cannot be written.
    """
    # Each rank would start all runs.
    if environment.under_torchrun():
        raise ConfigError("-m: starts the processes of its runs itself; leave torchrun out")
    keys, overrides = split_keys(lines)
    reject_other_launchers(overrides)
    grid = make_grid(keys, overrides)
    driver = Driver(grid)
    shares: list[dict[str, str]] = []
    if driver.pending:
        # Not of a grid that is finished: its runs were checked, and composing them takes longer
        # than finding that nothing is left to do.
        needs = check_all(overrides, multirun=True, read=needs_of)
        shares = share_machine(keys, needs)[: len(driver.pending)]
    try:
        exit_code = driver.run(shares)
    except OSError as error:
        raise RunError(describe_full(grid.folder, error)) from error
    command = shlex.join(["python", "train.py", "-m", *lines])
    print_end(driver, exit_code, f"RUN_ID={grid.name} {command}")
    return exit_code


def split_keys(lines: Sequence[str]) -> tuple[Keys, list[str]]:
    """The keys of the grid, and the overrides of its runs."""
    typed: dict[str, Any] = {}
    others = []
    try:
        for line in lines:
            if line.startswith(PREFIX):
                (override,) = parse([line])
                typed[override.key_or_group.removeprefix(PREFIX)] = override.value()
            else:
                others.append(line)
        keys: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Keys), typed))
    except OmegaConfBaseException as error:
        text = str(error.msg).splitlines()[0]
        names = ", ".join(f"{PREFIX}{name}" for name in OmegaConf.structured(Keys))
        raise ConfigError(f"{PREFIX}{error.full_key}: {text}; a grid has {names}") from None
    except HydraException as error:
        raise ConfigError(message_of(error)) from None
    if keys.jobs is not None and keys.jobs < 1:
        raise ConfigError(f"{PREFIX}jobs={keys.jobs}: must be at least 1")
    return keys, others


def reject_other_launchers(overrides: Sequence[str]) -> None:
    """Reject plugins of Hydra that would start the runs in another way."""
    for line in overrides:
        if line.lstrip("+~").startswith(OWN_OF_HYDRA):
            raise ConfigError(
                f"{line}: each run of a grid has processes of its own; {PREFIX}jobs=4 trains four "
                "at once, cluster=NAME on a cluster, and samestep sweep searches with Optuna"
            )


def make_grid(keys: Keys, overrides: Sequence[str]) -> Grid:
    """The grid of a command line, of whose runs the first was checked."""
    runs = expand_grid(overrides)
    cfg = check(runs[0].overrides)
    if cfg.run_id is not None:
        raise ConfigError("run_id: each run of a grid has its own; RUN_ID=NAME names the grid")
    cluster = cfg.cluster.name
    if "cluster" in runs[0].values:
        raise ConfigError("cluster: all runs of a grid are on the same one; choose one")
    name = name_grid(cfg, runs)
    if cluster == LOCAL:
        program = [str(project_folder() / "train.py")]
    elif keys.wait:
        program = FOLLOW
    else:
        program = SUBMIT
    return Grid(
        name=name,
        folder=Path(cfg.run_root, FOLDER, name),
        jobs=make_jobs(cfg, name, runs),
        program=program,
        variables={VARIABLE: str(project_folder())},
        stop_on_failure=keys.stop_on_failure,
        # The nodes of Slurm share run_root with this machine, pods do not.
        is_elsewhere=cluster not in (LOCAL, "slurm"),
        is_left=program == SUBMIT,
    )


def name_grid(cfg: DictConfig, runs: Sequence[GridRun]) -> str:
    """The name the grid was given, otherwise one such as ``mnist-mlp-3f2a1b``.

    The same command makes the same name, also with more values or in another order.
    """
    given = environment.run_id()
    if given:
        return given
    # Without the values of the keys that vary: one more of them makes the grid larger, and no
    # other grid. And not from the files: a new comment in one of them must not lose the grid.
    values = runs[0].values
    words = []
    for group in ("data", "model"):
        if group not in values:
            words.append(str(cfg.choices[group]))
    digest = digest_of([sorted(runs[0].fixed), sorted(values)])[:6]
    # Without data the choice is an empty list.
    return re.sub("[^a-z0-9]+", "-", "-".join([*words, digest]).lower()).strip("-")


def make_jobs(cfg: DictConfig, name: str, runs: Sequence[GridRun]) -> list[Job]:
    """The jobs of a grid, each once, with their names."""
    longest = MAX_NAME - cfg.cluster.get("longest_suffix", 0)
    is_strict = cfg.cluster.name != LOCAL
    # A value that was typed twice makes one run.
    by_digest = {}
    readable = {}
    for run in runs:
        digest = digest_of(sorted(run.values.items()) or run.fixed)[:8]
        by_digest[digest] = run
        readable[digest] = f"{name}-{describe(run.values, is_strict=is_strict)}"
    num_of_name = Counter(readable.values())
    digest_composed = cache(digest_of_composed)
    # OmegaConf takes a millisecond to put a name into a path, and a grid may have thousands.
    cfg.run_id = ANY_RUN
    run_dirs = str(cfg.run_dir)
    jobs = []
    for digest, run in by_digest.items():
        run_id = readable[digest]
        # Values that a name cannot hold may be alike, such as those of a=b-c=d and a=b, c=d.
        is_alone = num_of_name[run_id] == 1
        if not (run.values and is_alone and len(run_id) <= longest):
            run_id = f"{name}-{digest}"
        if len(run_id) > longest or not NAME.holds(run_id):
            raise ConfigError(f"RUN_ID={name}: a run would be called {run_id}, which {NAME.text}")
        inputs = partial(inputs_of, digest_composed, run)
        run_dir = Path(run_dirs.replace(ANY_RUN, run_id))
        jobs.append(Job(run_id, run_dir, run.overrides, run.values, inputs))
    return jobs


def inputs_of(digest_composed: Callable[[tuple[str, ...]], str], run: GridRun) -> str:
    """A digest of the configuration of a run."""
    # Composed once for all values of a key: that takes a tenth of a second.
    return digest_of([digest_composed(run.blank), sorted(run.values.items())])


def digest_of_composed(lines: tuple[str, ...]) -> str:
    """A digest of what these overrides make of the files; empty if that is no configuration."""
    # Someone may edit a file while the grid trains: the run itself says what is wrong.
    with suppress(ConfigError):
        return digest_of(compose_unchecked(lines))
    return ""


def describe(values: Mapping[str, str], *, is_strict: bool) -> str:
    """The values of a run as a part of its name, such as ``lr-0.001-seed-0``.

    The order in which the keys were typed does not count.

    Args:
        values: by their keys.
        is_strict: whether a cluster must accept the name, which allows neither dots nor capitals.
    """
    last_parts = {key: re.split(r"[./@]", key)[-1] for key in values}
    num_of_part = Counter(last_parts.values())
    words = []
    for key in sorted(values):
        shown = last_parts[key]
        if num_of_part[shown] > 1:
            shown = key
        words += [re.sub("[^A-Za-z0-9]", "-", shown), show(values[key], is_strict=is_strict)]
    text = "-".join(words)
    if is_strict:
        return text.lower().replace(".", "-")
    return text


def show(value: str, *, is_strict: bool) -> str:
    """A value in a name; one that it cannot hold is a digest, since two must never look alike."""
    if NUMBER.fullmatch(value):
        # No other number has this form.
        return value
    is_word = WORD.fullmatch(value) is not None
    if is_word and (value.islower() or not is_strict):
        # A word with a hyphen is none of these, and so cannot be taken for this one.
        return value.replace("_", "-")
    return digest_of(value)[:6]


def digest_of(value: Any) -> str:
    """The SHA-256 of plain containers, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()


class Needs(NamedTuple):
    """What a run needs."""

    cluster: str
    topology: tuple[str, int | str, int]


def needs_of(cfg: DictConfig) -> Needs:
    """What the run of this configuration needs."""
    return Needs(cfg.cluster.name, topology_of(cfg))


def share_machine(keys: Keys, needs: Collection[Needs]) -> list[dict[str, str]]:
    """More variables for each run that trains at the same time: its GPUs and processors."""
    at_once = keys.jobs or 1
    # Runs of one grid are on the same cluster, and mostly need the same.
    clusters, topologies = map(set, zip(*needs, strict=True))
    if LOCAL not in clusters:
        # What waits for a job of the cluster needs nothing of this machine.
        if keys.wait and keys.jobs is None:
            at_once = PLACES_ON_CLUSTER
        return [{}] * at_once
    most = max(starting.num_processes(*topology) for topology in topologies)
    on_cpus = all(accelerator == "cpu" for accelerator, _, _ in topologies)
    gpus: list[str | None] = [None] * at_once
    # A single run at a time may have all of them.
    if at_once > 1 and not on_cpus:
        gpus = slots.share_gpus(f"{PREFIX}jobs", at_once, most)
    return slots.variables_of(gpus, most)


def print_end(driver: Driver, exit_code: int, command: str) -> None:
    """Print which runs have failed, and the commands that come next."""
    grid = driver.grid
    if driver.failed:
        print(f"{len(driver.failed)} of {len(grid.jobs)} runs have failed:")
        for run_id, why in driver.failed.items():
            print(f"  {run_id}: {why}")
        print(f"What they have printed is in {driver.logs}")
    if exit_code:
        print(f"To train what is missing:\n  {command}", flush=True)
        return
    if grid.is_left:
        return
    words = ["samestep", "runs"]
    if grid.folder.parent != Path("runs", FOLDER):
        words.append(str(grid.folder.parent.parent))
    print(f"Compare its runs:\n  {shlex.join([*words, '--grid', grid.name])}", flush=True)
