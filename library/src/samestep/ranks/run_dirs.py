"""Where a run is: an absolute path, fixed when its Trainer is made, and the same on all ranks.

A script may make up the name of its directory, from the time or from random numbers, and each rank
runs the script. So a process that becomes their agent hands on the directories that the script has
named in it. Ranks that something else has started compare theirs when they meet.
"""

import json
from pathlib import Path

from samestep.errors import ConfigError
from samestep.option_names import option
from samestep.ranks import environment, process_group

_fixed: list[str] = []  # in this process, in the order in which its Trainers were made


def fix(run_dir: str | Path) -> Path:
    """The directory of the run that a Trainer is made for; a later ``chdir`` does not move it."""
    path = Path(environment.expand_home(str(run_dir), "run_dir")).absolute()
    handed_on = json.loads(environment.variable(environment.RUN_DIRS) or "[]")
    # The script has made as many Trainers before this one as in the process of its agent. A process
    # that a rank has started inherits the variable, and is no rank.
    number = len(_fixed)
    if environment.under_torchrun() and number < len(handed_on):
        path = Path(handed_on[number])
    _fixed.append(str(path))
    return path


def hand_on() -> None:
    """Let the ranks that are started from here use the directories of this process."""
    environment.set_variable(environment.RUN_DIRS, json.dumps(_fixed))


def check_same(run_dir: Path) -> None:
    """Find ranks that would write to other directories; every rank must call this.

    Nodes may have the directory in different places, because they need not share a disk. Its name
    is that of the run, which is the same everywhere.

    Raises:
        ConfigError: on every rank, with the directories of two ranks.
    """
    everyone = process_group.gather((environment.node_rank(), str(run_dir)))
    first_of_node: dict[int, str] = {}
    first = Path(everyone[0][1])
    for rank, (node, text) in enumerate(everyone):
        is_same = text == first_of_node.setdefault(node, text) and Path(text).name == first.name
        if not is_same:
            raise ConfigError(
                f"{option('run_dir')}: rank 0 has {first}, and rank {rank} has {text}; all ranks "
                "need one name, so do not make it from the time or from random numbers, or make "
                "it before the ranks start and hand it on in a variable"
            )
