"""The folder of the project with configs/, k8s/ and train.py, and its groups. Imports no torch."""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from samestep.errors import ConfigError
from samestep.ranks import environment
from samestep.run_spec import select

MAIN = "configs/train.yaml"
VARIABLE = "SAMESTEP_PROJECT"
NOT_GROUPS = ("sweep",)  # folders of configs/ for another command: samestep sweep
# Files that others include, which cannot be chosen.
SHARED = (
    "data/default", "model/default", "cluster/common", "cluster/pods", "cluster/kubernetes"
)  # fmt: skip


def project_folder() -> Path:
    """The folder with ``configs/train.yaml``.

    The first of these counts: $SAMESTEP_PROJECT, which a search sets for its trials; the folder of
    the started script, or one of the two above it; the current directory, or the nearest one above.
    """
    named = environment.variable(VARIABLE)
    if named:
        if not Path(named, MAIN).is_file():
            raise ConfigError(f"{VARIABLE}={named}: there is no {MAIN}; unset it, or correct it")
        return Path(named)
    program, here = Path(sys.argv[0]).absolute(), Path.cwd()
    candidates = [here, *here.parents]
    # Not the folder of the command `samestep`: it may belong to the environment of another project.
    if program.suffix == ".py":
        candidates = [*program.parents[:3], *candidates]
    for folder in candidates:
        if (folder / MAIN).is_file():
            return folder
    raise ConfigError(
        f"{here}: there is no {MAIN} here or above; change to the folder of your project; "
        "a script with samestep.Trainer needs none, and tests and predicts by its Trainer"
    )


def add_project() -> None:
    """Make the code of the project importable: that of this folder, as ``train.py`` does.

    Another clone of it may be installed.
    """
    folder = project_folder()
    sys.path[:0] = [str(folder / "src"), str(folder)]


def find_packages() -> list[str]:
    """The packages in ``src/`` of the project: their code is the user's own."""
    return [path.parent.name for path in project_folder().glob("src/*/__init__.py")]


def configs_folder() -> Path:
    """``configs/`` of the project."""
    return project_folder() / "configs"


def config_folders() -> list[Path]:
    """``configs/``, and the existing folders that ``hydra.searchpath`` of train.yaml adds to it.

    If two folders have the same file, the first one counts.
    """
    # Hydra reads an entry such as file://examples/language/configs relative to the current
    # directory. Here it is relative to the project, so that a command works from anywhere.
    project = project_folder()
    file = project / MAIN
    folders = [configs_folder()]
    for entry in _read_main(file, file.stat().st_mtime_ns).search_path:
        folder = project / entry.removeprefix("file://")
        if folder.is_dir():
            folders.append(folder)
    return folders


def default_groups() -> Sequence[str]:
    """The groups in the defaults list of ``train.yaml``."""
    file = project_folder() / MAIN
    return _read_main(file, file.stat().st_mtime_ns).groups


class _Main(NamedTuple):
    """What ``train.yaml`` says about other files."""

    search_path: Sequence[str]
    groups: Sequence[str]


@functools.cache
def _read_main(file: Path, modified_ns: int) -> _Main:
    """Read ``train.yaml``; cached, because YAML takes milliseconds to parse."""
    content = yaml.safe_load(file.read_text("utf-8"))
    # Anything else than groups of keys is reported later, by Hydra.
    entries = select(content, "hydra.searchpath") or []
    groups = []
    for default in select(content, "defaults") or []:
        # Such as ``optional local: default``; ``_self_`` chooses nothing.
        if isinstance(default, dict):
            groups += [str(name).split()[-1].lstrip("/") for name in default]
    return _Main([str(entry) for entry in entries], groups)


def choices_of(*folders: Path) -> dict[str, list[str]]:
    """The groups in these folders of configs, and the files that can be chosen in each."""
    groups: dict[str, set[str]] = {}
    for configs in folders:
        for folder in configs.rglob("*/"):
            group = folder.relative_to(configs).as_posix()
            if group in NOT_GROUPS:
                continue
            names = groups.setdefault(group, set())
            for file in folder.glob("*.yaml"):
                if f"{group}/{file.stem}" not in SHARED:
                    names.add(file.stem)
    return {group: sorted(groups[group]) for group in sorted(groups)}


def search_path_override() -> list[str]:
    """The override with which Hydra finds ``config_folders`` from any current directory."""
    quoted = [f"'file://{folder.absolute()}'" for folder in config_folders()[1:]]
    return [f"hydra.searchpath=[{','.join(quoted)}]"]


def find_config(group: str, name: str) -> Path | None:
    """The file that ``group=name`` chooses; None if there is none."""
    for folder in config_folders():
        file = folder / group / f"{name}.yaml"
        if file.exists():
            return file
    return None
