"""Check, submit, follow and cancel a run under Slurm, by Slurm's own commands.

Several jobs may have one name. The comment of a job says of which run it is, and in which folder.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from samestep.errors import ConfigError, RunError
from samestep.launch import kubectl, ownership, render
from samestep.launch.poll import EXTRA_S, poll, print_once
from samestep.launch.render import Manifest
from samestep.ranks.process import EXIT_LOST_READER, has_lost_reader

ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "TIMEOUT",
}  # fmt: skip

RUNNING = ("RUNNING", "COMPLETING")

FOLDER = f"{kubectl.IDENTITY}root"  # in a comment: run_root, as it was configured

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
    reject_active(cfg, manifests, find_jobs(cfg, manifests)[1])
    answer = call("sbatch", "--test-only", script=render.text(manifests))
    print(f"{cfg.run_id}: Slurm would accept it: {answer.removeprefix('sbatch: ')}")
    return 0


def submit(cfg: DictConfig, manifests: Sequence[Manifest]) -> int:
    """Queue the run, also one that has ended before; change nothing while it is in the queue."""
    own, foreign = find_jobs(cfg, manifests)
    active = find_active(own)
    if active:
        print(f"{cfg.run_id}: job {active[0]['JobId']} is in the queue already, nothing to do")
        return 0
    reject_active(cfg, manifests, foreign)
    # Slurm does not make the folder of the output, and the job would fail without a word.
    Path(cfg.run_root).mkdir(parents=True, exist_ok=True)
    print(call("sbatch", script=render.text(manifests)))
    return 0


def logs(cfg: DictConfig, manifests: Sequence[Manifest]) -> int:
    """Print what all nodes have printed, until the run ends."""
    stdout = os.fstat(sys.stdout.fileno())
    printed: dict[str, int] = {}  # bytes of each file
    described: set[str] = set()
    for jobs in poll(lambda: find_own(cfg, manifests)):
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
    jobs = find_own(cfg, manifests)
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
    jobs = find_own(cfg, manifests)
    if not jobs:
        raise build_missing_error(cfg)
    active = find_active(jobs)
    if not active:
        print(f"{cfg.run_id}: has ended, nothing to cancel")
        return 0
    # The trials of a sweep are one job array, which ends as a whole.
    numbers = {job.get("ArrayJobId", job["JobId"]) for job in active}
    call("scancel", *numbers)
    limit_s = cfg.cluster.grace_s + EXTRA_S
    for left in poll(lambda: find_active(find_own(cfg, manifests)), limit_s):
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


def find_jobs(cfg: DictConfig, manifests: Sequence[Manifest]) -> tuple[list[Job], list[Job]]:
    """Find the last job of the run, and all jobs of its name that are not the run's.

    The last job is one entry, or one for each trial. Slurm forgets jobs some minutes after their
    end.
    """
    # %F is the number of the whole job, also for a trial of a sweep.
    words = ("--me", "--noheader", "--states=all", f"--name={cfg.run_id}", "--format=%F")
    numbers = {int(word) for word in call("squeue", *words).split() if word.isdigit()}
    ours = find_labels(manifests)
    own: list[Job] = []
    foreign: list[Job] = []
    for number in sorted(numbers):
        shown = call("scontrol", "show", "job", "--oneliner", str(number))
        jobs = [dict(FIELD.findall(line)) for line in shown.splitlines()]
        if ours.items() <= read_labels(jobs[0]).items():
            # A run that was submitted again has several jobs. Only the newest is about its state.
            own = jobs
        else:
            foreign += jobs
    return own, foreign


def find_own(cfg: DictConfig, manifests: Sequence[Manifest]) -> list[Job]:
    """Find the last job of the run.

    Raises:
        ConfigError: if all jobs of its name are of others.
    """
    own, foreign = find_jobs(cfg, manifests)
    if foreign and not own:
        raise build_foreign_error(cfg, manifests, foreign[-1])
    return own


def find_active(jobs: Sequence[Job]) -> list[Job]:
    """Find the jobs that have not ended."""
    return [job for job in jobs if job["JobState"] not in ENDED]


def reject_active(cfg: DictConfig, manifests: Sequence[Manifest], foreign: Sequence[Job]) -> None:
    """Raise a ConfigError if one of the jobs of others has not ended."""
    for job in find_active(foreign):
        raise build_foreign_error(cfg, manifests, job)


def find_labels(manifests: Sequence[Manifest]) -> dict[str, str]:
    """Find whose a job of the run is, as its comment will say; empty if it has none."""
    (manifest,) = manifests
    comment = manifest["sbatch"].get("comment", "")
    return read_labels({"Comment": comment, "WorkDir": str(Path.cwd())})


def read_labels(job: Job) -> dict[str, str]:
    """Read whose a job is; the folder of its runs becomes a full path."""
    labels = ownership.read_labels(job.get("Comment", ""))
    if FOLDER in labels:
        labels[FOLDER] = str(Path(job["WorkDir"], labels[FOLDER]).resolve())
    return labels


def build_foreign_error(cfg: DictConfig, manifests: Sequence[Manifest], job: Job) -> ConfigError:
    """Build the error for a job that has the name of the run, and belongs to another one."""
    ours, labels = find_labels(manifests), read_labels(job)
    folder = labels.get(FOLDER)
    if ours | {FOLDER: folder} == labels:
        return ConfigError(
            f"{cfg.run_id}: job {job['JobId']} is a run of this name in {folder}, not in "
            f"{ours[FOLDER]}; choose another RUN_ID, or run_root={folder}"
        )
    place = f"job {job['JobId']} of this name"
    since = f", since {job['SubmitTime']}"
    return ownership.build_conflict(cfg, place, labels, ours, since=since)


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
