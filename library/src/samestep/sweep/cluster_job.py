"""Be the process of a trial that a cluster trains: submit its job, and wait until it ends.

It behaves as ``train.py`` does: exit code 0 finished, 1 failed, 2 refused; and SIGTERM cancels the
job, which saves first, and ends with 143. A cluster that does not answer is asked again.
"""

import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

from omegaconf import DictConfig

from samestep.errors import ConfigError, RunError
from samestep.hydra.name import name_run
from samestep.launch import check, kubectl, kubernetes, local_settings, render, slurm, submitted
from samestep.launch.follow import describe_run, explain_pods
from samestep.ranks import failure, process
from samestep.ranks.failure import EXIT_SIGTERM

POLL_S = 2.0
ANSWER_S = 600  # seconds for which a cluster may not answer before the trial has failed


class Stopped(Exception):
    """The search wants the trial to end."""


def main(overrides: Sequence[str]) -> int:
    """Submit the run, and wait until it has ended.

    Returns:
        The exit code.
    """
    signal.signal(signal.SIGTERM, _raise_stopped)
    try:
        return run_job(overrides)
    except (ConfigError, RunError) as error:
        return failure.report(error)
    except Stopped:
        return EXIT_SIGTERM


def run_job(overrides: Sequence[str]) -> int:
    """Submit, wait, and cancel if the search says so."""
    words = local_settings.to_overrides(overrides)
    cfg, documents = prepare(words)
    actions = slurm.ACTIONS if cfg.cluster.name == "slurm" else kubernetes.ACTIONS
    submitted.remember(cfg.run_id, words)
    try:
        actions["submit"](cfg, documents)
        return 0 if wait(cfg, documents) else 1
    except Stopped:
        # A second signal must not interrupt the cancellation.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        actions["cancel"](cfg, documents)
        return EXIT_SIGTERM


def prepare(words: Sequence[str]) -> tuple[DictConfig, list[render.Document]]:
    """The configuration and the manifests of a run, checked as before every submit.

    Raises:
        ConfigError: naming the mistakes.
    """
    cfg = local_settings.compose_for_cluster(words)
    cfg.run_id = name_run(cfg)
    documents = render.render(cfg, words)
    check.refuse(check.faults(cfg, documents))
    check.refuse(check.check_examples(cfg))
    return cfg, documents


def wait(cfg: DictConfig, documents: Sequence[render.Document]) -> bool:
    """Wait until the job has ended: whether it succeeded.

    Raises:
        RunError: if it was removed, or if the cluster does not answer for a long time.
    """
    last_answer = time.monotonic()
    while True:
        try:
            outcome = ask(cfg, documents)
            last_answer = time.monotonic()
        except RunError:
            if time.monotonic() > last_answer + ANSWER_S:
                raise
            outcome = None
        if outcome is not None:
            return outcome
        time.sleep(POLL_S)


def ask(cfg: DictConfig, documents: Sequence[render.Document]) -> bool | None:
    """Whether the job succeeded; None if it has not ended. Print why it failed."""
    if cfg.cluster.name == "slurm":
        return ask_slurm(cfg)
    run = kubectl.get(cfg, kubectl.build_address(kubectl.find_run(documents)))
    if run is None:
        print(f"error: {cfg.run_id}: was removed from the cluster before it ended", flush=True)
        return False
    outcome = kubectl.find_outcome(run)
    if outcome is False:
        reasons = [*explain_pods(kubectl.get_pods(cfg), []), describe_run(run)]
        print(f"error: {cfg.run_id}: {reasons[0]}", flush=True)
    return outcome


def ask_slurm(cfg: DictConfig) -> bool | None:
    """Whether the job of Slurm succeeded; None if it has not ended."""
    jobs = slurm.find_jobs(cfg)
    if not jobs:
        print(f"error: {slurm.build_missing_error(cfg)}", flush=True)
        return False
    if not all(job["JobState"] in slurm.ENDED for job in jobs):
        return None
    is_done = all(job["JobState"] == "COMPLETED" for job in jobs)
    if not is_done:
        print(f"error: {slurm.describe(cfg, jobs[0], with_times=False)}", flush=True)
    return is_done


def _raise_stopped(signum: int, frame: FrameType | None) -> None:
    raise Stopped


if __name__ == "__main__":
    process.run(lambda: main(sys.argv[1:]))
