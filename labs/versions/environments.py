"""Environments with other versions of torch and Lightning than the one that the project locks.

Each is made by uv from ``requirements.lock``, of which it replaces a few packages. On a CPU no
library of CUDA is needed: torch is installed without what it depends on, and *stand-ins*, libraries
of the same names whose functions find no GPU, let it be loaded. That is 1 GB instead of 6.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from tests.conftest import ROOT

FOLDER = ROOT / "build" / "versions"
LOCK = ROOT / "requirements.lock"
OF_CUDA = re.compile(r"(cuda|nvidia|triton)([-=]|$)")
"""Packages that torch needs for GPUs."""
BOUND_TO_TORCH = ("torch", "torchvision")
"""Packages that the lock has for its own torch."""
CUDA_LIBRARY = re.compile(r"lib(cu|nv|nccl)")
CUDA_SYMBOL = re.compile(r"_*(cu|nv|nccl)")
NO_DEVICE = 100
"""What every function of a stand-in answers: cudaErrorNoDevice."""


@dataclass(frozen=True)
class Environment:
    """Versions that are installed together.

    Args:
        python: such as 3.11.
        torch: such as 2.8.0.
        lightning: such as 2.5.6.
        is_lowest: every other package of the library has the lowest version that it allows.
    """

    python: str
    torch: str
    lightning: str
    is_lowest: bool = False

    @property
    def name(self) -> str:
        """Such as ``python3.11-torch2.8.0-lightning2.5.6``."""
        lowest = "-lowest" if self.is_lowest else ""
        return f"python{self.python}-torch{self.torch}-lightning{self.lightning}{lowest}"

    @property
    def folder(self) -> Path:
        """Where it is, or will be."""
        return FOLDER / self.name

    @property
    def interpreter(self) -> Path:
        """Its Python."""
        return self.folder / "bin" / "python"


ENVIRONMENTS = [
    Environment("3.11", "2.6.0", "2.5.6", is_lowest=True),
    Environment("3.11", "2.6.0", "2.5.6"),
    Environment("3.13", "2.6.0", "2.6.6"),
    Environment("3.11", "2.8.0", "2.5.6"),
    Environment("3.12", "2.8.0", "2.6.6"),
    Environment("3.12", "2.11.0", "2.5.6"),
    Environment("3.11", "2.11.0", "2.6.6"),
    Environment("3.11", "2.13.0", "2.5.6"),
    Environment("3.13", "2.13.0", "2.6.6"),
    Environment("3.13", "2.15.0", "2.5.6"),
    Environment("3.12", "2.15.0", "2.6.6"),
    Environment("3.11", "2.15.0", "2.6.6"),
    Environment("3.14", "2.15.0", "2.6.6"),
]
"""Every pair of torch and Lightning, and every pair of Python with either, but not all triples."""


def make(environment: Environment) -> None:
    """Install an environment, unless it is there.

    Raises:
        subprocess.CalledProcessError: uv or the compiler has failed; it has said why.
    """
    stamp = environment.folder / "made"
    if stamp.exists():
        return
    uv("venv", "--quiet", "--clear", "--python", environment.python, str(environment.folder))
    replaced = {"torch": environment.torch, "lightning": environment.lightning}
    if environment.is_lowest:
        replaced = lowest_versions() | replaced
    locked = environment.folder / "locked.txt"
    locked.write_text(select(LOCK.read_text(), without={*replaced, *BOUND_TO_TORCH}))
    # Every package is named, so none brings another one along.
    install = "pip", "install", "--quiet", "--no-deps", "--python", str(environment.interpreter)
    uv(*install, "--require-hashes", "--requirement", str(locked))
    uv(*install, *(f"{name}=={version}" for name, version in replaced.items()))
    uv(*install, "--editable", str(ROOT / "library"), "--editable", str(ROOT))
    (torch,) = environment.folder.glob("lib/python*/site-packages/torch/lib")
    make_stand_ins(torch)
    stamp.touch()


def uv(*args: str) -> None:
    """Run uv, without the constraints that pyproject.toml has for the lock."""
    subprocess.run([sys.executable, "-m", "uv", "--no-config", *args], check=True, cwd=ROOT)


def select(lock: str, without: set[str]) -> str:
    """The entries of a lock file, without these packages and those of CUDA."""
    entries = re.split(r"^(?=[a-z0-9])", lock, flags=re.M)
    kept: list[str] = []
    for entry in entries:
        name = re.split(r"[=\s\[]", entry, maxsplit=1)[0]
        if name not in without and not OF_CUDA.match(name):
            kept.append(entry)
    return "".join(kept)


def lowest_versions() -> dict[str, str]:
    """The lowest version of each package that the library needs, by what it says itself."""
    project = tomllib.loads((ROOT / "library" / "pyproject.toml").read_text())["project"]
    versions: dict[str, str] = {}
    for text in project["dependencies"]:
        requirement = Requirement(text)
        for specifier in requirement.specifier:
            if specifier.operator == ">=":
                versions[requirement.name] = specifier.version
    return versions


def make_stand_ins(torch: Path) -> None:
    """Make a library for each one of CUDA that the libraries of torch are linked with.

    Args:
        torch: the folder of torch's libraries, where they search first.
    """
    libraries = [*torch.glob("*.so*")]
    symbols: dict[str, set[str]] = defaultdict(set)  # by version; without one, by ""
    undefined = read_elf("--dyn-syms", "--wide", *libraries)
    for name, version in re.findall(r" UND (\w+)(?:@(\S+))?", undefined):
        if CUDA_SYMBOL.match(name):
            symbols[version].add(name)
    versions_of: dict[str, set[str]] = defaultdict(set)
    needs = read_elf("--version-info", "--wide", *libraries)
    for library, names in re.findall(r"  File: (\S+)  Cnt: .*\n((?:.* Name: .*\n)+)", needs):
        versions_of[library].update(re.findall(r"Name: (\S+)", names))
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", read_elf("--dynamic", *libraries))
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "all.c"), Path(folder, "versions")
        # Each stand-in has all functions; a caller takes the one of the version that it names.
        for name in sorted(set().union(*symbols.values())):
            with source.open("a") as file:
                file.write(f"long {name}(void) {{ return {NO_DEVICE}; }}\n")
        for library in sorted(set(needed)):
            if not CUDA_LIBRARY.match(library) or (torch / library).exists():
                continue
            options = ["-shared", "-w", f"-Wl,-soname,{library}"]
            versions = ""
            for version in sorted(versions_of[library]):
                names = "; ".join(sorted(symbols[version]))
                versions += f"{version} {{ global: {names}; }};\n"
            if versions:
                script.write_text(versions)
                options.append(f"-Wl,--version-script,{script}")
            subprocess.run(["gcc", *options, source, "-o", torch / library], check=True)


def read_elf(*args: str | Path) -> str:
    """What the tool of this name says of libraries."""
    return subprocess.run(["readelf", *args], check=True, stdout=subprocess.PIPE, text=True).stdout
