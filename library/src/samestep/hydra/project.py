"""Where the project lies whose configs/, k8s/ and train.py are used."""

import functools
import sys
from pathlib import Path

import yaml

from samestep.errors import ConfigError
from samestep.ranks import environment

MAIN = "configs/train.yaml"
VARIABLE = "SAMESTEP_PROJECT"


def project_folder() -> Path:
    """The folder with ``configs/train.yaml``.

    It is $SAMESTEP_PROJECT, which a search sets for its trials. Otherwise it is the folder of the
    started script, or one of the two above that; otherwise the current directory or the nearest one
    above it.
    """
    if named := environment.variable(VARIABLE):
        if not Path(named, MAIN).is_file():
            raise ConfigError(f"{VARIABLE}={named}: there is no {MAIN}; unset it, or correct it")
        return Path(named)
    program, here = Path(sys.argv[0]).absolute(), Path.cwd()
    # The command `samestep` may lie in the environment of another project.
    of_script = program.parents[:3] if program.suffix == ".py" else ()
    for folder in (*of_script, here, *here.parents):
        if (folder / MAIN).is_file():
            return folder
    raise ConfigError(
        f"{here}: there is no {MAIN} here or above; change to the folder of your project"
    )


def configs_folder() -> Path:
    """``configs/`` of the project."""
    return project_folder() / "configs"


def config_folders() -> list[Path]:
    """``configs/``, and the existing folders that ``hydra.searchpath`` of train.yaml adds to it.

    Hydra reads an entry such as ``file://examples/language/configs`` relative to the current
    directory. Here it is relative to the project. Where two folders have the same file, the first
    one counts.
    """
    project = project_folder()
    file = project / MAIN
    folders = [configs_folder()]
    for entry in _read_search_path(file, file.stat().st_mtime_ns):
        folder = project / entry.removeprefix("file://")
        if folder.is_dir():
            folders.append(folder)
    return folders


@functools.cache
def _read_search_path(file: Path, modified_ns: int) -> list[str]:
    """``hydra.searchpath`` of a file: read once, because YAML takes milliseconds for each look."""
    content = yaml.safe_load(file.read_text("utf-8"))
    hydra = content.get("hydra") if isinstance(content, dict) else None
    entries = hydra.get("searchpath") if isinstance(hydra, dict) else None
    return [str(entry) for entry in entries or []]


def search_path_override() -> list[str]:
    """What Hydra must be told to find ``config_folders`` from any current directory."""
    added = config_folders()[1:]
    if not added:
        return []
    quoted = [f"'file://{folder.absolute()}'" for folder in added]
    return [f"hydra.searchpath=[{','.join(quoted)}]"]


def find_config(group: str, name: str) -> Path | None:
    """The file that ``group=name`` chooses; None if there is none."""
    for folder in config_folders():
        file = folder / group / f"{name}.yaml"
        if file.exists():
            return file
    return None
