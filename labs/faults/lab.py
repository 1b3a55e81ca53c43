"""Harms real runs, lets them continue, and compares them with unharmed ones.

The oracle: the final weights of every rank are bit-identical to those of the run that was left
alone, and so are the images of every step, the final metrics and the history.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from filelock import FileLock

from labs.faults import store
from library.tests import etcd_server, pods
from library.tests.programs import PATIENCE_S
from samestep.plugins.time_file import read_starts
from samestep.ranks.process_tree import descendants_of
from samestep.report.wall_time import account_of
from samestep.run import record
from tests.conftest import ROOT, environment, final_metrics, free_port, run_ranks
from tests.project.test_train import history

BASE = [
    "trainer.accelerator=cpu", "data.global_batch_size=60", "trainer.max_epochs=3", "model=mlp",
    "model.net.dropout=0.2", "data.crop_padding=1",
    # A save within an epoch would leave less to repeat.
    "callbacks.checkpoints.every_s=300",
]  # fmt: skip
CHANGES_NO_METRIC = ("cluster.timeout_s=", "+callbacks.slow.", "callbacks.slow.")
"""How overrides begin that an unharmed run does not need to end with the same metrics."""

MAX_ERROR_S = 0.2
"""How much an account of the time away may differ from the clock of the saboteur."""
REPEATED = "is repeated"
"""In the note of a run whose repeated steps differ from before."""
TABLES = "tables"
Process = subprocess.Popen[bytes]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def alone() -> list[list[str]]:
    return [[sys.executable, "train.py"]]


def self_launched() -> list[list[str]]:
    return [[sys.executable, "train.py", "trainer.devices=2"]]


def torchrun(*options: str, num: int = 2) -> list[list[str]]:
    return [[*TORCHRUN, "--standalone", f"--nproc-per-node={num}", *options, "train.py"]]


def agents(*processes: int) -> list[list[str]]:
    """One agent per node, with that many ranks each, and static rendezvous."""
    port = free_port()
    return [
        [
            *TORCHRUN, f"--nnodes={len(processes)}", f"--node-rank={rank}",
            f"--nproc-per-node={num}", "--master-addr=127.0.0.1", f"--master-port={port}",
            "train.py",
        ]
        for rank, num in enumerate(processes)
    ]  # fmt: skip


def indexed_job(*more: str) -> list[list[str]]:
    """Two pods, each with a network of its own and the entry point as process 1."""
    options = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=pod-0.lab", *more]
    return [[sys.executable, "-m", "samestep.launch.entrypoint", *options]] * 2


def etcd_workers() -> list[list[str]]:
    """Two nodes that may come and go; they wait long enough for each other to be two again."""
    options = [
        "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=etcd-v2",
        f"--rdzv-endpoint={ETCD_HERE}",
        "--rdzv-conf=timeout=200,last_call_timeout=100", "--max-restarts=9",
    ]  # fmt: skip
    return [[sys.executable, "-m", "samestep.launch.entrypoint", *options]] * 2


PODS, PODS_THAT_RESTART = "pods 1+1", "pods 1+1, restarts"
OWN_FOLDERS = "nodes without a shared folder"
ETCD, ETCD_HERE = "etcd 1+1", "ETCD"
"""Where the nodes meet by etcd, and what stands for its address until it runs."""
S3 = "1 process, S3"
TOPOLOGIES: dict[str, tuple[int, Callable[[], list[list[str]]]]] = {
    "1 process": (1, alone),
    "2 processes": (2, self_launched),
    "torchrun 2": (2, torchrun),
    "torchrun 2, restarts": (2, lambda: torchrun("--max-restarts=30", "--monitor-interval=0.1")),
    "agents 1+1": (2, lambda: agents(1, 1)),
    "agents 1+2": (3, lambda: agents(1, 2)),
    OWN_FOLDERS: (2, lambda: agents(1, 1)),
    PODS: (2, indexed_job),
    PODS_THAT_RESTART: (2, lambda: indexed_job("--max-restarts=3")),
    ETCD: (2, etcd_workers),
    S3: (1, alone),
}


@dataclass
class Experiment:
    """A fault, where it happens, and what is done to the files before the run continues."""

    name: str
    topology: str
    faults: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    damage: Callable[[Path], None] | None = None
    damaged_attempt: int = 1  # after which the files are damaged
    exit_codes: tuple[int, ...] = ()  # of the harmed attempt, if it must end in a certain way
    says: str = ""  # what the user must be told
    logs: tuple[int, ...] = ()  # ranks that must write down where they hang
    max_attempts: int = 3
    has_exact_time: bool = False  # whether rank zero is killed, and nothing else ends


@dataclass
class Outcome:
    """What became of a run."""

    survived: bool
    why: str
    resume_s: float
    steps_repeated: int
    attempts: int


def root_of(node: int, topology: str, run_dir: Path) -> Path:
    """Where a node has its runs. Node 0 has them in the same place on every topology."""
    is_own = topology == OWN_FOLDERS and node > 0
    return run_dir.parent / f"node-{node}" if is_own else run_dir.parent


@contextmanager
def in_sessions(
    commands: list[list[str]], log: BinaryIO, run_id: str, **variables: str
) -> Iterator[list[Process]]:
    """The commands as processes here; none outlives the attempt."""
    processes: list[Process] = []
    try:
        for command in commands:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment(RUN_ID=run_id, **variables),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            processes.append(process)
        yield processes
    finally:
        for process in processes:
            # Read before the agent is killed: afterwards its ranks are nobody's children.
            ranks = descendants_of(process.pid) if process.poll() is None else []
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for rank in ranks:  # torchrun gives each rank a session of its own
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)


def replace_word(commands: list[list[str]], old: str, new: str) -> list[list[str]]:
    """The commands with another argument in place of this one."""
    return [[new if word == old else word for word in command] for command in commands]


@contextmanager
def in_pods(commands: list[list[str]], log: BinaryIO, run_id: str) -> Iterator[list[Process]]:
    """The commands as the pods of an Indexed Job, with cluster-like DNS."""
    with tempfile.TemporaryDirectory() as directory, pods.cluster(Path(directory)) as cluster:
        cluster.records[f"pod-0.lab.{pods.DOMAIN}"] = cluster.address(2)
        for index, command in enumerate(commands):
            variables = environment(RUN_ID=run_id, JOB_COMPLETION_INDEX=str(index))
            cluster.start(f"pod-{index}", command, log, variables)
        yield cluster.pods


@contextmanager
def beside_etcd(commands: list[list[str]], log: BinaryIO, run_id: str) -> Iterator[list[Process]]:
    """The commands as processes here, and an etcd that a saboteur can find."""
    server = etcd_server.EtcdServer(Path(log.name).with_name(f"records-{run_id}"))
    commands = replace_word(
        commands, f"--rdzv-endpoint={ETCD_HERE}", f"--rdzv-endpoint={server.address}"
    )
    with server.running(), in_sessions(commands, log, run_id) as processes:
        yield processes


@contextmanager
def beside_s3(commands: list[list[str]], log: BinaryIO, run_id: str) -> Iterator[list[Process]]:
    """The commands as processes here, and a store with their data that a saboteur can harm."""
    folder = Path(log.name).parent
    records, tables = folder / f"records-{run_id}", folder / TABLES
    commands = replace_word(commands, f"data.root={tables}", "data.root=s3://lab/tables")
    with (
        store.failing_store(records, tables) as variables,
        in_sessions(commands, log, run_id, **variables) as processes,
    ):
        yield processes


SURROUNDINGS = {S3: beside_s3, PODS: in_pods, PODS_THAT_RESTART: in_pods, ETCD: beside_etcd}


class Laboratory:
    """Runs experiments in ``directory``; an unharmed run of each kind is made once.

    Several laboratories, also of several processes, may share a directory.
    """

    def __init__(self, directory: Path, base: Sequence[str] = BASE) -> None:
        self.directory = directory
        self.base = base

    def launch(
        self, topology: str, run_dir: Path, overrides: list[str], timeout: float = PATIENCE_S
    ) -> tuple[list[int], str]:
        """One attempt at a run: the exit codes of its agents, and what they said."""
        _, make_commands = TOPOLOGIES[topology]
        commands = []
        for node, command in enumerate(make_commands()):
            run_root = root_of(node, topology, run_dir)
            commands.append([*command, *self.base, *overrides, f"run_root={run_root}"])
        surroundings = SURROUNDINGS.get(topology, in_sessions)
        path = run_dir.parent / f"{run_dir.name}.log"
        with path.open("ab") as log:
            start = log.tell()
            with surroundings(commands, log, run_dir.name) as processes:
                codes = wait_for_all(processes, timeout)
        return codes, path.read_bytes()[start:].decode(errors="replace")

    def reference(self, topology: str, overrides: list[str]) -> Path:
        """Directory of what an unharmed run on as many ranks recorded."""
        num_ranks, _ = TOPOLOGIES[topology]
        overrides = [word for word in overrides if not word.startswith(CHANGES_NO_METRIC)]
        kind = json.dumps([num_ranks, *overrides]).encode()
        name = f"reference-{hashlib.sha256(kind).hexdigest()[:12]}"
        run_dir = self.directory / name
        with FileLock(self.directory / f"{name}.lock"):
            if not (run_dir / "metrics.json").exists():
                words = [*self.base, *overrides, *self.saboteur(name, [])]
                words.append(f"run_root={self.directory}")
                nodes = {1: (), 2: (2,), 3: (1, 2)}[num_ranks]
                done = run_ranks("train.py", *words, nodes=nodes, RUN_ID=name)
                assert done.returncode == 0, done.stderr
        return run_dir

    def saboteur(self, name: str, faults: list[str]) -> list[str]:
        node = "+callbacks.saboteur"
        return [
            f"{node}._target_=labs.faults.saboteur.Saboteur",
            f"{node}.dirpath={self.directory}/records-{name}",
            f"{node}.faults=[{','.join(faults)}]",
        ]

    def run(self, experiment: Experiment) -> Outcome:
        """Harm a run, repeat its command until it has finished, and judge the result."""
        harmless = experiment.overrides
        if experiment.topology == S3:
            store.write_tables(self.directory / TABLES)
            harmless = [*harmless, f"data.root={self.directory / TABLES}"]
        reference = self.reference(experiment.topology, harmless)
        name = re.sub(r"[\W_]", "-", f"{experiment.name} {experiment.topology}")
        run_dir, records = self.directory / name, self.directory / f"records-{name}"
        for path in (run_dir, records):
            shutil.rmtree(path, ignore_errors=True)
        overrides = [*harmless, *self.saboteur(name, experiment.faults)]
        first: list[int] = []
        launched: list[float] = []
        everything = ""
        attempt = 0
        for attempt in range(1, experiment.max_attempts + 1):
            timeout = PATIENCE_S + 60 * len(experiment.faults)
            launched.append(time.time())
            codes, said = self.launch(experiment.topology, run_dir, overrides, timeout)
            everything += said
            first = first or codes
            if attempt == experiment.damaged_attempt and experiment.damage:
                experiment.damage(run_dir)
            # An exit code of zero is not enough: a run that lost its test has no metrics.
            if not any(codes) and (run_dir / "metrics.json").exists():
                break
        why = self.judge(experiment, first, everything, run_dir, reference)
        if not why and experiment.has_exact_time:
            why = wrong_account(run_dir, records, launched)
        repeated, resume_s = steps_repeated(records)
        return Outcome(not why, why, resume_s, repeated, attempt)

    def judge(
        self, experiment: Experiment, codes: list[int], said: str, run_dir: Path, reference: Path
    ) -> str:
        """What is wrong with a run, compared with the unharmed one; empty if nothing."""
        records = self.directory / f"records-{run_dir.name}"
        # Without this a fault that never came to be would count as survived.
        missing = [f for f in experiment.faults if not (records / f.replace(" ", "-")).exists()]
        if missing:
            return f"the fault was not done: {missing}"
        if not (run_dir / "metrics.json").exists():
            return f"not finished: exit codes {codes}"
        if experiment.exit_codes and set(codes) - set(experiment.exit_codes):
            return f"exit codes {codes} and not {experiment.exit_codes}"
        if experiment.says not in said:
            return f"does not say {experiment.says!r}"
        # Nothing that these runs need is lost, so what they repeat is what it was.
        if REPEATED in said:
            return "a repeated step differs"
        for rank in experiment.logs:
            if "most recent call first" not in (run_dir / f"logs/rank-{rank}.log").read_text():
                return f"no stacks in the log of rank {rank}"
        return differences(
            run_dir, records, reference, self.directory / f"records-{reference.name}"
        )


def wait_for_all(processes: list[Process], timeout: float) -> list[int]:
    """Their exit codes; 124, as of timeout(1), if they do not end in this time."""
    deadline = time.monotonic() + timeout
    codes = []
    for process in processes:
        try:
            codes.append(process.wait(max(1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            return [124]
    return codes


def differences(run_dir: Path, records: Path, reference: Path, expected: Path) -> str:
    """What differs between a run and the unharmed one: weights, images, metrics, history."""
    for path in sorted(expected.glob("weights-*.pt")):
        ours, theirs = torch.load(records / path.name), torch.load(path)
        if any(not torch.equal(ours[key], theirs[key]) for key in theirs):
            return f"other weights on {path.stem}"
    for path in sorted(expected.glob("rank-*.jsonl")):
        ours, theirs = steps(records / path.name), steps(path)
        if ours != theirs:
            odd = [step for step in theirs if ours.get(step) != theirs[step]]
            return f"other images in steps {odd[:5]} of {path.stem}"
    if final_metrics(run_dir) != final_metrics(reference):
        return "other final metrics"
    if history(run_dir) != history(reference):
        return "another history"
    return ""


def steps(path: Path) -> dict[tuple[int, int], list[int]]:
    """Images of each batch; those of a batch that was repeated must be the same each time."""
    ids: dict[tuple[int, int], list[int]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        key = (line["epoch"], line["batch"])
        if ids.setdefault(key, line["ids"]) != line["ids"]:
            ids[key] = []
    return ids


def steps_repeated(records: Path) -> tuple[int, float]:
    """Steps taken more than once, and seconds from the first fault to the next attempt's step."""
    path = records / "rank-0.jsonl"
    if not path.exists():
        return 0, 0.0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    places = {(line["epoch"], line["batch"]) for line in lines}
    repeated = len(lines) - len(places)
    # The notes of faults have no suffix, and hold the moment of each.
    faults = [json.loads(path.read_text()) for path in records.iterdir() if not path.suffix]
    if not faults:
        return repeated, 0.0
    first_fault = min(faults)
    later = [line["time"] for line in lines if line["attempt"] > first_fault]
    return repeated, (min(later) - first_fault if later else 0.0)


def wrong_account(run_dir: Path, records: Path, launched: list[float]) -> str:
    """What a run that was killed says of its time otherwise than the clocks here; empty if nothing.

    Args:
        run_dir: of the run, whose last attempt ends now.
        records: of its saboteur.
        launched: when each attempt was.
    """
    # When the results are written. Python takes seconds to end then, in which no thread runs.
    ended = (run_dir / "metrics.json").stat().st_mtime
    known = record.read(run_dir)
    starts = read_starts(run_dir, known.starts)
    if len(starts) != len(launched):
        return f"{len(starts)} accounts of {len(launched)} attempts"
    # In the order in which they were done; the name ends with step and rank.
    faults = sorted((json.loads(p.read_text()), p.name) for p in records.iterdir() if not p.suffix)
    for (moment, name), start, again in zip(faults, starts, launched[1:], strict=False):
        if start.step != int(name.split("-")[-2]):
            return f"killed at {name}, and its account ends after step {start.step}"
        following = starts[starts.index(start) + 1]
        if abs(following.away - (again - moment)) > MAX_ERROR_S:
            return f"{following.away:.3f} s away, and not {again - moment:.3f}"
    lines = [json.loads(line) for line in (records / "rank-0.jsonl").read_text().splitlines()]
    # The saboteur also writes down the step in which it kills, and which is never taken.
    repeated = len(lines) - len({line["step"] for line in lines}) - len(faults)
    account = account_of(run_dir, known)
    if account.repeated_steps != repeated:
        return f"{account.repeated_steps} steps repeated, and not {repeated}"
    if account.total_s < 0.99 * (ended - launched[0]):
        return f"{account.total_s:.2f} s of {ended - launched[0]:.2f} are accounted for"
    return ""


def flip(name: str) -> Callable[[Path], None]:
    """Change one bit in the middle of a checkpoint."""

    def damage(run_dir: Path) -> None:
        path = run_dir / "checkpoints" / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    return damage


def cut(name: str, share: float) -> Callable[[Path], None]:
    """Keep only the first part of a checkpoint."""

    def damage(run_dir: Path) -> None:
        path = run_dir / "checkpoints" / name
        os.truncate(path, int(path.stat().st_size * share))

    return damage
