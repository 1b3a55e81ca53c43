"""Where the project lies whose configs/, k8s/ and train.py are used."""

import sys
from pathlib import Path

from samestep.errors import ConfigError

MAIN = "configs/train.yaml"
VARIABLE = "SAMESTEP_PROJECT"


def project_folder() -> Path:
    """The folder with ``configs/train.yaml``: that of the program which runs, or this one.

    It is the folder of the started script, or one of the two above that; otherwise the current
    directory or the nearest one above it.

    Raises:
        ConfigError: if none of them has the file.
    """
    program, here = Path(sys.argv[0]).absolute(), Path.cwd()
    for folder in (*program.parents[:3], here, *here.parents):
        if (folder / MAIN).is_file():
            return folder
    raise ConfigError(
        f"{here}: there is no {MAIN} here or above; change to the folder of your project"
    )


def configs_folder() -> Path:
    """``configs/`` of the project."""
    return project_folder() / "configs"
