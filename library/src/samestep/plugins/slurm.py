"""Queue the job of Slurm in which a run is again, as ``#SBATCH --signal=SIGUSR1@90`` asks for.

It is what Lightning's users expect: the signal comes before the time limit, the run saves, and the
same job continues it when it is its turn again.
"""

import subprocess
import sys

from samestep.ranks import environment

ANSWERS_S = 60  # seconds that Slurm may take; a busy controller is slow


def requeue_job() -> bool:
    """Queue this job again, which ends it; on rank zero only, after all ranks have saved.

    Returns:
        Whether the run must stop. Otherwise Slurm has rejected it, as it does with ``--no-requeue``
        and in interactive jobs; then every step until the time limit counts.
    """
    job = environment.slurm_job()
    # In a batch script of `samestep launch`, which does so itself when the ranks have ended.
    if job is None or environment.variable(environment.ON_CLUSTER) is not None:
        return True
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWERS_S, check=False
        )
        reason = done.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    else:
        if done.returncode == 0:
            return True
    text = (
        f"Note: `{' '.join(command)}` has failed ({reason}), so the run continues until its limit"
    )
    print(text, file=sys.stderr, flush=True)
    return False
