"""Where the project lies whose configs/, k8s/ and train.py are used."""

import sys
from pathlib import Path

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
