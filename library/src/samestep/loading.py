"""The model and the data of a run, rebuilt from its directory."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from samestep import command_line
from samestep.errors import ConfigError
from samestep.hydra.project import find_packages
from samestep.ranks import environment
from samestep.run import manifest


def load_run(run_dir: str | Path, ckpt: str = "best", *, trust: bool = False) -> tuple[Any, Any]:
    """Rebuild the model and the data of a run from its directory.

    Call it in the folder of your project, or below.

    Args:
        run_dir: directory of the run, such as ``"runs/mine"``.
        ckpt: ``"best"`` by the monitored metric, ``"last"``, or a checkpoint that was kept, such as
            ``"epoch-0002"``.
        trust: call whatever the configuration of the run names, and download what it names. By
            default only your own code, and parts of torch, torchvision and torchmetrics that can do
            no harm, are called, and nothing is downloaded.

    Returns:
        The model, in evaluation mode and on the CPU, and its DataModule, not yet set up, or None.

    Raises:
        ConfigError: if the directory holds no such checkpoint, or its configuration names code that
            is not trusted.
        RunError: if the checkpoint is damaged.
    """
    from samestep.hydra import saved_run  # imports torch, which takes seconds

    return saved_run.load_run(Path(run_dir), ckpt, find_packages(), trust=trust)


def load_chosen(arguments: Namespace) -> tuple[Any, Any]:
    """What ``load_run`` returns for the options of a command line.

    ``arguments.ckpt`` becomes the checkpoint that the run has tested, if none was named. The data
    come from where the options say.
    """
    environment.limit_threads()
    command_line.print_results_only()
    arguments.ckpt = arguments.ckpt or manifest.tested_checkpoint(arguments.run_dir)
    model, data = load_run(arguments.run_dir, arguments.ckpt, trust=arguments.trust)
    set_places(data, arguments)
    return model, data


def set_places(data: Any, arguments: Namespace) -> None:
    """Set where the data of a run are now: ``arguments`` may have root, file, mirror and download.

    Raises:
        ConfigError: if the data have no such setting, or only the run names where to download to.
    """
    given = vars(arguments)
    if given.get("download") and given.get("root") is None and not given.get("trust"):
        raise ConfigError(
            "--download: needs --data-root DIR, the folder to download to; the run directory may "
            "be somebody else's, and then its folder is too"
        )
    for name in ("root", "file", "mirror", "download"):
        value = given.get(name)
        if value is None:
            continue
        if not hasattr(data, name):
            option = "--download" if name == "download" else f"--data-{name}"
            raise ConfigError(f"{option}: {type(data).__name__} of this run has no such setting")
        setattr(data, name, value)
