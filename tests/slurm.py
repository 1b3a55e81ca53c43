"""A real Slurm on this machine, made of processes of the tests, and a callback that calls it."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning as L

from library.tests.programs import PATIENCE_S, free_port, until
from samestep.ranks import stopping
from tests.conftest import environment

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scontrol", "scancel", "srun")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.sock,cred_expire=10
MessageTimeout=100
TCPTimeout=60
BatchStartTimeout=400
CommunicationParameters=DisableIPv6
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldParameters=enable_configless
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=60
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 Port={port_a} CPUs=1 RealMemory=8000
NodeName={host}b NodeHostname={host}b NodeAddr=127.0.0.1 Port={port_b} CPUs=1 RealMemory=8000
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 MaxTime=60 DefaultTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str:
    """Which of Slurm's programs are not on this machine."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    return " ".join(name for name in PROGRAMS if not shutil.which(name, path=path))


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Two nodes, both on this machine; the first one has its name, which resolves.

    Yields:
        The variables by which Slurm's commands find it.
    """
    values = {
        "folder": folder, "host": socket.gethostname().partition(".")[0], "user": getpass.getuser(),
        "port": free_port(), "port_a": free_port(), "port_b": free_port(),
    }  # fmt: skip
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(CONFIG.format(**values))
    (folder / "cgroup.conf").touch()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    variables = {"SLURM_CONF": f"{folder}/slurm.conf"}
    env = environment(**variables)
    env["PATH"] += ":/usr/sbin"
    munge = [
        f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("pid-file", "log-file")
    ]
    munge += [f"--key-file={key}", f"--socket={folder}/munge.sock", f"--seed-file={folder}/seed"]
    processes = []

    def start(*command: str) -> None:
        with (folder / f"{command[0]}.out").open("ab") as log:
            processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))

    try:
        start("munged", "--foreground", "--force", *munge)
        wait_for(lambda: (folder / "munge.sock").exists(), folder, processes)
        start("slurmctld", "-D", "-c")
        start("slurmd", "-D", "-N", values["host"])
        start("slurmd", "-D", "-N", f"{values['host']}b")
        sinfo = ["sinfo", "--noheader", "--partition=main", "--format=%D %t"]
        wait_for(
            lambda: (
                subprocess.run(sinfo, env=env, capture_output=True, check=False).stdout
                == b"2 idle\n"
            ),
            folder,
            processes,
        )
        yield variables
    finally:
        if all(process.poll() is None for process in processes):
            subprocess.run(["scancel", "--me"], env=env, check=False, timeout=PATIENCE_S)
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:  # slurmd waits for a job step that does not end
                process.kill()
                process.wait()


def wait_for(condition, folder: Path, processes: list[subprocess.Popen]) -> None:
    """Wait until ``condition()`` holds, while all processes run."""

    def said() -> str:
        return "\n".join(path.read_text()[-2000:] for path in folder.glob("*.out"))

    def holds() -> bool:
        assert not any(process.poll() for process in processes), said()
        return condition()

    until(holds, says=said)


class Caller(L.Callback):
    """Calls a command before a training step, and waits until it brings a signal to this rank.

    Args:
        events: texts "step command"; the number of an event is the number of restarts before it.
    """

    def __init__(self, events: list[str]) -> None:
        self.events = dict(enumerate(events))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        step, _, command = self.events.get(restarts, "-1").partition(" ")
        if trainer.global_step != int(step) or trainer.global_rank:
            return
        # Slurm signals every process of the job, so the command may be ended before it returns.
        subprocess.run(command, shell=True, check=False)
        until(is_stopped, says=lambda: f"{command}: brought no SIGTERM")


def is_stopped() -> bool:
    return stopping._State.signum == signal.SIGTERM


class WaitsIfBad(L.Callback):
    """Lets a run that is less accurate wait, after an epoch, until it is stopped."""

    def __init__(self, accuracy: float) -> None:
        self.accuracy = accuracy

    def on_train_epoch_start(self, trainer, *_) -> None:
        if trainer.callback_metrics.get("val/accuracy", 1) < self.accuracy:
            until(is_stopped)
