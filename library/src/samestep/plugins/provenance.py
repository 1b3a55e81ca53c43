"""The code and the machine of a run, which each start records."""

import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from samestep.ranks import environment
from samestep.ranks.secrets import hide_assigned, hide_quoted, redact
from samestep.run.files import write_text
from samestep.run.record import Record
from samestep.run_spec import RunSpec


def note_start(spec: RunSpec, starts: list[dict[str, Any]], first_step: int) -> None:
    """Add the code and the machine to this start, and write ``logs/git.diff``."""
    *before, start = starts
    commit, diff = code_state(Path.cwd())
    write_text(spec.run_dir / "logs/git.diff", diff)
    machine = machine_info()
    # One text: a list of hundreds of lines would be slow to read, for people too.
    packages = " ".join(f"{name}=={version}" for name, version in machine["packages"].items())
    git = {"commit": commit, "dirty": bool(diff)}
    start.update({"git": git, **machine, "packages": packages})
    # Hundreds of packages would be listed once for each start. The newest start has them.
    if before and before[-1].get("packages") == packages:
        del before[-1]["packages"]


def packages_of(known: Record) -> dict[str, str]:
    """The versions of the packages that were installed at the newest start."""
    versions = {}
    for word in str(known.start.get("packages", "")).split():
        name, separator, version = word.partition("==")
        if separator:
            versions[name] = version
    return versions


def code_state(code: Path) -> tuple[str | None, str]:
    """The commit that is checked out in ``code``, and the diff to it, without secrets.

    New files appear in the diff by name only. Without git, as in a container, the commit is the one
    in PROJECT_REVISION, or None.
    """

    def git(*arguments: str) -> str:
        # No lock: a run must not block a commit that the user makes meanwhile. In a container the
        # folder often belongs to another user, which git rejects without safe.directory.
        command = ["git", "--no-optional-locks", "-c", "safe.directory=*", *arguments]
        try:
            done = subprocess.run(command, cwd=code, capture_output=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.decode(errors="replace")

    commit = git("rev-parse", "HEAD").strip() or environment.variable("PROJECT_REVISION")
    status = git("status", "--porcelain")
    diff = ""
    if status:
        diff = f"{status}\n{git('diff', '--no-ext-diff', 'HEAD')}"
    hidden = []
    for part in re.split(r"^(?=diff --git )", diff, flags=re.MULTILINE):
        if part.partition("\n")[0].endswith(".py"):
            # In Python only literals can be secrets; what follows `token =` is usually code.
            hidden.append(hide_quoted(part))
        else:
            hidden.append("\n".join(map(hide_assigned, part.split("\n"))))
    return commit, redact("".join(hidden))


def cpu_name() -> str:
    """The model name of this machine's CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    # `platform` knows no more than x86_64 on Linux. On ARM this file has no model name either.
    if cpuinfo.exists():
        found = re.search(r"model name\s*: (.*)", cpuinfo.read_text())
        if found:
            return found[1]
    # On macOS `platform` says arm, of whatever chip, and other chips round in other ways.
    with suppress(OSError, subprocess.SubprocessError):
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    return platform.processor() or platform.machine()


def memory_gib() -> float | None:
    """The memory of this machine; None where the system does not say."""
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def find_packages() -> dict[str, str]:
    """The version of each package that Python finds, by its normalized name: ``scikit-learn``."""
    versions = {}
    # If two folders have a package, the first one in sys.path counts: it is written last here.
    for folder in reversed(sys.path):
        with suppress(OSError):  # an entry may be a zip file, or no longer exist
            for entry in Path(folder).glob("*-*.dist-info"):
                # The name of the folder has both. importlib.metadata reads a file per package,
                # which for 300 packages takes longer than the rest of a start's records.
                name, _, version = entry.name.removesuffix(".dist-info").partition("-")
                versions[re.sub(r"[-_.]+", "-", name).lower()] = version
    return dict(sorted(versions.items()))


def machine_info() -> dict[str, Any]:
    """Machine, processes and the version of every installed package."""
    import torch  # only here: `packages_of` also serves what starts without torch

    return {
        "hostname": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        # Programs that wanted to compute in the last minute, without which speeds say little.
        "load": round(os.getloadavg()[0], 1),
        "memory_gib": memory_gib(),
        "gpus": [*map(torch.cuda.get_device_name, range(torch.cuda.device_count()))],
        "world_size": environment.world_size(),
        "num_nodes": environment.num_nodes(),
        "packages": find_packages(),
    }
