"""What a start records of its code and its machine."""

import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from samestep.ranks import environment
from samestep.ranks.secrets import hide_assigned, hide_quoted, redact


def code_state(code: Path) -> tuple[str | None, str]:
    """The commit ``code`` is at, and what differs from it, without secrets: new files by name only.

    Without git, as in a container, it is the commit that PROJECT_REVISION names, if it is set.
    """

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-c", "safe.directory=*", *arguments]
        try:
            done = subprocess.run(command, cwd=code, capture_output=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.decode(errors="replace")

    commit = git("rev-parse", "HEAD").strip() or environment.variable("PROJECT_REVISION")
    status = git("status", "--porcelain")
    diff = f"{status}\n{git('diff', '--no-ext-diff', 'HEAD')}" if status else ""
    hidden = []
    for part in re.split(r"^(?=diff --git )", diff, flags=re.MULTILINE):
        if part.partition("\n")[0].endswith(".py"):
            # In a program only texts in quotes are secret: what else follows a name is code.
            hidden.append(hide_quoted(part))
        else:
            hidden.append("\n".join(map(hide_assigned, part.split("\n"))))
    return commit, redact("".join(hidden))


def cpu_name() -> str:
    """What the processors of this machine are called."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    return names[0] if names else platform.processor() or platform.machine()


def find_packages() -> dict[str, str]:
    """The version of each package that Python finds, by its normalized name: ``scikit-learn``."""
    versions = {}
    # Where two folders have a package, the first one counts.
    for folder in reversed(sys.path):
        with suppress(OSError):  # such as a zip file, or a folder that is gone
            for entry in Path(folder).glob("*-*.dist-info"):
                # The name of the folder says both. To read the metadata of 300 packages would take
                # longer than all other records of a start.
                name, _, version = entry.name.removesuffix(".dist-info").partition("-")
                versions[re.sub(r"[-_.]+", "-", name).lower()] = version
    return dict(sorted(versions.items()))


def machine_info() -> dict[str, Any]:
    """Time, machine, processes and the version of every installed package."""
    import torch  # asked for the GPUs

    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "hostname": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "world_size": environment.world_size(),
        "num_nodes": environment.num_nodes(),
        "packages": find_packages(),
    }
