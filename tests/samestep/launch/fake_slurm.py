"""A queue in memory behind ``slurm.call``. A real one: test_slurm_cluster.py."""

import re
import shlex
from pathlib import Path

Job = dict[str, str]
SUBMITTED = "2026-11-28T16:02:23"


class FakeSlurm:
    """Call it as ``slurm.call``.

    Attributes:
        jobs: in the order of their numbers.
        done: the calls that changed something.
    """

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.done: list[str] = []

    def __call__(self, *command: str, script: str = "") -> str:
        if command[0] == "squeue":
            (name,) = [word for word in command if word.startswith("--name=")] or ["--name="]
            found = [job for job in self.jobs if job["JobName"] == name.removeprefix("--name=")]
            return "\n".join(job["JobId"] for job in found)
        if command[0] == "scontrol":
            (job,) = [job for job in self.jobs if job["JobId"] == command[-1]]
            return " ".join(f"{key}={value}" for key, value in job.items()) + " "
        if "--test-only" in command:
            return "sbatch: Job 1 to start"
        self.done.append(" ".join(command))
        if command[0] == "scancel":
            for job in self.jobs:
                if job["JobId"] in command:
                    job["JobState"] = "CANCELLED"
            return ""
        lines = re.findall("^#SBATCH (.*)$", script, re.MULTILINE)
        options = dict(shlex.split(line)[0][2:].partition("=")[::2] for line in lines)
        return self.put(options["job-name"], options.get("comment", ""))

    def put(self, name: str, comment: str = "", folder: str = "", state: str = "RUNNING") -> str:
        """Queue a job; say what sbatch says."""
        number = str(len(self.jobs) + 76)
        self.jobs.append(
            {
                "JobId": number,
                "JobName": name,
                "JobState": state,
                "SubmitTime": SUBMITTED,
                "WorkDir": folder or str(Path.cwd()),
                # Slurm writes a space after it.
                **({"Comment": f"{comment} "} if comment else {}),
                "StdOut": "/nowhere",
                "RunTime": "1",
                "TimeLimit": "2",
            }
        )
        return f"Submitted batch job {number}"
