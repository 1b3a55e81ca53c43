"""Check, submit, follow and cancel a run under Slurm, by Slurm's own commands."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from samestep.errors import RunError
from samestep.launch import render
from samestep.launch.poll import EXTRA_S, poll, print_once
from samestep.launch.render import Manifest
from samestep.ranks.process import EXIT_LOST_READER, has_lost_reader

ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "TIMEOUT",
}  # fmt: skip

RUNNING = ("RUNNING", "COMPLETING")

FIELD = re.compile(r"(\w+)=(.*?)(?= \w+=| ?$)")

Job = dict[str, str]
"""What ``scontrol show job`` says about one job, or about one trial of a sweep."""


def check(cfg: DictConfig, manifests: Sequence[Manifest]) -> int:
    """Ask Slurm, if it answers here, whether it would accept the job."""
    print(f"{cfg.run_id}: no errors in the configuration")
    try:
        call("squeue", "--me")
    except RunError as error:
        print(f"{cfg.run_id}: Slurm was not checked; {error}")
        return 0
    answer = call("sbatch", "--test-only", script=render.text(manifests))
    print(f"{cfg.run_id}: Slurm would accept it: {answer.removeprefix('sbatch: ')}")
    return 0


def submit(cfg: DictConfig, manifests: Sequence[Manifest]) -> int:
    """Queue the run, also one that has ended before; change nothing while it is in the queue."""
    active = find_active(cfg)
    if active:
        print(f"{cfg.run_id}: job {active[0]['JobId']} is in the queue already, nothing to do")
        return 0
    # Slurm does not make the folder of the output, and the job would fail without a word.
    Path(cfg.run_root).mkdir(parents=True, exist_ok=True)
    print(call("sbatch", script=render.text(manifests)))
    return 0


def logs(cfg: DictConfig, manifests: Sequence[Manifest]) -> int:
    """Print what all nodes have printed, until the run ends."""
    stdout = os.fstat(sys.stdout.fileno())
    printed: dict[str, int] = {}  # bytes of each file
    described: set[str] = set()
    for jobs in poll(lambda: find_jobs(cfg)):
        if not jobs:
            break
        for job in jobs:
            print_new_lines(job, printed)
            # Without times, which would make a new line of every poll.
            print_once([describe(cfg, job, with_times=False)], described)
        states = {job["JobState"] for job in jobs}
        if states <= ENDED:
            return 0 if states == {"COMPLETED"} else 1
        if has_lost_reader(stdout):
            return EXIT_LOST_READER
    raise build_missing_error(cfg)


def status(cfg: DictConfig, manifests: Sequence[Manifest]) -> int:
    """Print the state of the job, or of each trial, with the reason and the last line of output."""
    jobs = find_jobs(cfg)
    if not jobs:
        raise build_missing_error(cfg)
    for job in jobs:
        print(describe(cfg, job))
        output = Path(job.get("StdOut", ""))
        # Of a job that waits there is no file yet.
        if not output.is_file():
            continue
        lines = output.read_text(errors="replace").splitlines()
        if lines:
            print(f"  last line: {lines[-1]}")
    return 0


def cancel(cfg: DictConfig, manifests: Sequence[Manifest]) -> int:
    """Let the run save, end its job, and wait until it has ended."""
    if not find_jobs(cfg):
        raise build_missing_error(cfg)
    active = find_active(cfg)
    if not active:
        print(f"{cfg.run_id}: has ended, nothing to cancel")
        return 0
    # The trials of a sweep are one job array, which ends as a whole.
    numbers = {job.get("ArrayJobId", job["JobId"]) for job in active}
    call("scancel", *numbers)
    for left in poll(lambda: find_active(cfg), cfg.cluster.grace_s + EXTRA_S):
        if not left:
            print(f"{cfg.run_id}: cancelled; the same submit resumes it")
            return 0
    raise RunError(f"{cfg.run_id}: was cancelled, and has not ended yet; see samestep status")


ACTIONS = {"check": check, "submit": submit, "logs": logs, "status": status, "cancel": cancel}


def call(*command: str, script: str = "") -> str:
    """Run a command of Slurm, and return what it prints.

    Raises:
        RunError: if the command fails, with what Slurm says about it.
    """
    try:
        done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RunError(
            f"{command[0]}: no such command on this machine; use a login node of the cluster, or "
            "take the output of samestep launch --render there; the command was\n"
            f"  {shlex.join(command)}"
        ) from None
    if done.returncode:
        message = "; ".join(done.stderr.split("\n")).strip("; ")
        raise RunError(message or f"{command[0]} failed")
    # sbatch --test-only prints its answer to stderr.
    return (done.stdout + done.stderr).strip()


def find_jobs(cfg: DictConfig) -> list[Job]:
    """Find the last job with the name of the run: one entry, or one for each trial.

    Slurm forgets jobs some minutes after their end.
    """
    # %F is the number of the whole job, also for a trial of a sweep.
    words = ("--me", "--noheader", "--states=all", f"--name={cfg.run_id}", "--format=%F")
    numbers = [int(word) for word in call("squeue", *words).split() if word.isdigit()]
    if not numbers:
        return []
    # A run that was submitted again has several jobs. Only the newest one is about its state.
    shown = call("scontrol", "show", "job", "--oneliner", str(max(numbers)))
    return [dict(FIELD.findall(line)) for line in shown.splitlines()]


def find_active(cfg: DictConfig) -> list[Job]:
    """Find the jobs of the run that have not ended."""
    return [job for job in find_jobs(cfg) if job["JobState"] not in ENDED]


def build_missing_error(cfg: DictConfig) -> RunError:
    """The error for a run that Slurm does not know."""
    return RunError(
        f"{cfg.run_id}: Slurm has no job of yours with this name; it forgets a job some minutes "
        f"after its end: see {cfg.run_root}/{cfg.run_id}*.out, or type sacct --name={cfg.run_id}"
    )


def describe(cfg: DictConfig, job: Job, *, with_times: bool = True) -> str:
    """Describe the state of a job in a sentence, with Slurm's reason if it waits or has failed."""
    name = cfg.run_id
    if "ArrayTaskId" in job:
        name = f"{cfg.run_id}-{job['ArrayTaskId']}"
    words = [f"{name}: job {job['JobId']}: {job['JobState']}", explain_state(job)]
    if with_times:
        words.append(describe_times(job))
    restarts = job.get("Restarts", "0")
    if restarts != "0":
        words.append(f"started again {restarts} times")
    return ", ".join(filter(None, words))


def explain_state(job: Job) -> str:
    """Say where a job runs, how it failed, or what it waits for."""
    state = job["JobState"]
    if state in RUNNING:
        return f"on {job.get('NodeList', '(null)')}"
    # Slurm writes EXIT_CODE:SIGNAL. After a signal its reason says more than the number.
    exit_code, _, signal = job.get("ExitCode", "").partition(":")
    if state == "FAILED" and signal == "0":
        return f"exit code {exit_code}"
    reason = job.get("Reason", "None")
    return "" if reason == "None" else reason


def describe_times(job: Job) -> str:
    """Say how long a job has run, or when Slurm expects to start it."""
    state = job["JobState"]
    if state in RUNNING:
        return f"for {job['RunTime']} of {job['TimeLimit']}"
    start = job.get("StartTime", "Unknown")
    if state == "PENDING" and start != "Unknown":
        return f"Slurm expects to start it at {start}"
    return ""


def print_new_lines(job: Job, printed: dict[str, int]) -> None:
    """Print what a job has printed since the last call; of a trial with its number."""
    path = Path(job.get("StdOut", ""))
    # Of a job that waits there is no file yet.
    if not path.is_file():
        return
    start = printed.get(str(path), 0)
    with path.open("rb") as file:
        file.seek(start)
        text = file.read()
    if job["JobState"] not in ENDED:
        # The rest of the last line is not written yet.
        text = text[: text.rfind(b"\n") + 1]
    printed[str(path)] = start + len(text)
    prefix = ""
    if "ArrayTaskId" in job:
        prefix = f"[{job['ArrayTaskId']}] "
    for line in text.decode(errors="replace").splitlines():
        print(f"{prefix}{line}", flush=True)
