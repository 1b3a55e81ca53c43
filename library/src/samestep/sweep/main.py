"""Search good values for some keys of the configuration: what ``samestep sweep`` does."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from samestep.errors import ConfigError, RunError
from samestep.hydra.folder import project_folder
from samestep.ranks import environment, failure
from samestep.run import lock
from samestep.sweep.settings import Settings, read


def main(argv: Sequence[str], help_text: str, script: Path | None = None) -> int:
    """Run the search that the words describe, or continue it.

    Returns:
        0 done, 1 no trial was completed, or an error; 2 wrong usage or configuration; 143 and 130
        after a signal.
    """
    if {"-h", "--help"} & set(argv):
        print(help_text.strip())
        return 0
    try:
        return sweep(read(argv), argv, script or project_folder() / "train.py")
    except (ConfigError, RunError) as error:
        return failure.report(error)
    except OSError as error:
        what = f"{error.filename or 'the search'} cannot be written: {error.strerror}"
        again = "make room there. The same command continues the search"
        return failure.report(RunError(f"{what}; {again}"))


def sweep(settings: Settings, argv: Sequence[str], script: Path) -> int:
    """Search, and leave the results.

    Returns:
        The exit code.
    """
    if settings.on_cluster:
        refuse_on_cluster(settings)
    # Torch and Optuna take seconds to import, which wrong usage does not need.
    from samestep.hydra.build import check_arguments
    from samestep.sweep import results
    from samestep.sweep.search import Search, share_devices
    from samestep.sweep.study import FINISHED, Record, build_strategies

    # Before a folder is made: what each trial would refuse when it builds its parts.
    for cfg in settings.corners:
        check_arguments(cfg)
    build_strategies(settings, num_trials=0)
    share_devices(settings)
    made = open_folder(settings)
    at_once = settings.values["trials_at_once"]
    environment.limit_threads(at_once * results.count_devices(settings))
    try:
        record = Record(settings)
    except ConfigError:
        remove_folder(made)
        raise
    done, total = len(record.trials(*FINISHED)), settings.values["n_trials"]
    word = f"Continuing, {done} of {total} trials are done" if done else f"{total} trials"
    print(f"Search: {settings.folder}: {word}, to {settings.direction} {settings.monitor}")
    exit_code = Search(settings, record, script).run()
    if exit_code:
        done = len(record.trials(*FINISHED))
        print(f"Stopped: {done} of {total} trials are done. To continue:")
        print(f"  {format_command(settings, argv)}", flush=True)
        return exit_code
    return results.leave(settings, record)


def open_folder(settings: Settings) -> list[Path]:
    """Make the folder of the search, and own it until this process ends.

    Returns:
        The folders that were not there before, the deepest first.

    Raises:
        ConfigError: if it cannot be made, or if another process searches in it.
    """
    folder = settings.folder
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        lock.acquire(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror}; make room or get permission there, or "
            "choose another directory with run_root=..."
        ) from error
    return missing


def remove_folder(made: Sequence[Path]) -> None:
    """Remove the folders that this search has made, as long as nobody has written into them."""
    for folder in made:
        for name in (lock.FILE, "owner", "journal.log"):
            (folder / name).unlink(missing_ok=True)
        try:
            folder.rmdir()
        except OSError:
            return


def refuse_on_cluster(settings: Settings) -> None:
    """Check the manifests of a trial, as before a submit.

    Raises:
        ConfigError: naming the mistakes.
    """
    from samestep.launch import local_settings
    from samestep.sweep import cluster_job

    words = local_settings.to_overrides(settings.overrides)
    last = f"{settings.name}-{settings.values['n_trials'] - 1}"
    with environment.exported({"RUN_ID": last}):
        cfg, _ = cluster_job.prepare(words)
    user = cfg.cluster.get("user")  # Slurm's jobs have the user who submits them
    if settings.values["shared_run_root"] and user not in (None, os.getuid()):
        raise ConfigError(
            f"shared_run_root=true: the search makes folders in {cfg.run_root} as user "
            f"{os.getuid()}, in which the pods, as cluster.user={user}, cannot write; start the "
            "search as that user, set cluster.user to yours, or let it read copies: "
            "callbacks.artifacts.url=s3://bucket/runs"
        )


def format_command(settings: Settings, argv: Sequence[str]) -> str:
    """The command that continues the search, for a shell."""
    line = shlex.join(["samestep", "sweep", *argv])
    name = environment.run_id()
    return f"RUN_ID={name} {line}" if name else line
