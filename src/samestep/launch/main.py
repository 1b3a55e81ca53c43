"""Send a run to a cluster, or ask about one: what ``scripts/launch.py`` does. Imports no torch."""

import shlex
import subprocess
from collections.abc import Sequence

from omegaconf import DictConfig

from samestep.config.compose import CONFIGS
from samestep.config.compose import check as compose
from samestep.config.schema import choices_of, nearest
from samestep.errors import ConfigError, RunError
from samestep.launch import render
from samestep.ranks import environment, failure
from samestep.run.name import name_run

ACTIONS_ON_EXISTING_RUN = ("logs", "status", "cancel")
ACTIONS = ("render", "check", "data", "submit", *ACTIONS_ON_EXISTING_RUN)


def main(argv: Sequence[str], help_text: str) -> int:
    """Do what ``action=`` in ``argv`` says with the run that the other words describe.

    Returns:
        0 done, 1 error, 2 wrong usage or configuration; or the exit code of the cluster's own
        command.
    """
    if {"-h", "--help"} & set(argv):
        print(help_text.strip())
        return 0
    try:
        action = parse_action(argv)
        return launch(action, [word for word in argv if not word.startswith("action=")])
    except (ConfigError, RunError) as error:
        return failure.report(error)


def parse_action(argv: Sequence[str]) -> str:
    """Find the last ``action=``; without one it is ``render``.

    Raises:
        ConfigError: if there is no such action.
    """
    given = [word.removeprefix("action=") for word in argv if word.startswith("action=")]
    action = given[-1] if given else "render"
    if action not in ACTIONS:
        near = nearest(action, ACTIONS)
        hint = f"did you mean action={near}? " if near else ""
        raise ConfigError(f"action={action}: no such action; {hint}there is {', '.join(ACTIONS)}")
    return action


def launch(action: str, overrides: Sequence[str]) -> int:
    """Do ``action`` with the run that ``overrides`` describe.

    Returns:
        The exit code.
    """
    cfg = compose(overrides)
    if action in ACTIONS_ON_EXISTING_RUN and not (cfg.run_id or environment.run_id()):
        raise ConfigError(
            f"RUN_ID: is not set; action={action} needs the name that action=submit printed"
        )
    if action == "data":
        return fill_volume(cfg, overrides)
    cfg.run_id = name_run(cfg)
    if "manifest" not in cfg.cluster:
        others = [name for name in choices_of(CONFIGS)["cluster"] if name != cfg.cluster.name]
        raise ConfigError(
            f"cluster={cfg.cluster.name}: needs no launching, python train.py runs it; "
            f"clusters are {', '.join(others)}"
        )
    documents = render.render(cfg, overrides) if cfg.cluster.manifest else []
    if action == "render":
        print(render.text(documents) if documents else format_submit(cfg, overrides), end="")
        return 0

    # They take a third of a second to import, which action=render does not need.
    from samestep.launch import check, kubernetes

    if action in ("check", "submit"):
        check.refuse(check.faults(cfg, documents))
    if action == "submit":
        check.refuse(check.placeholder(cfg))
    if "commands" in cfg.cluster:
        return run_command(cfg, overrides, action, documents)
    return kubernetes.ACTIONS[action](cfg, documents)


def fill_volume(cfg: DictConfig, overrides: Sequence[str]) -> int:
    """Download and verify the data set in the cluster, into the volume of the runs.

    Returns:
        The exit code.
    """
    from samestep.launch import check, kubernetes, volume

    cfg.run_id = volume.name_job(cfg)
    documents = volume.render_job(cfg, overrides)
    check.refuse([*check.faults(cfg, documents), *check.placeholder(cfg)])
    return kubernetes.fill_volume(cfg, documents)


def format_submit(cfg: DictConfig, overrides: Sequence[str]) -> str:
    """Write the command that submits the run as a line for a shell."""
    return shlex.join(render.command(cfg, overrides, "submit")) + "\n"


def run_command(
    cfg: DictConfig, overrides: Sequence[str], action: str, documents: Sequence[render.Document]
) -> int:
    """Run the cluster's own command for ``action``; it reads the documents.

    Returns:
        The exit code of the command.
    """
    if action == "check":
        print(f"{cfg.run_id}: no mistakes found")
        return 0
    command = render.command(cfg, overrides, action)
    if not command:
        raise ConfigError(
            f"cluster={cfg.cluster.name} action={action}: nothing on this machine does that; "
            "action=render prints what to type elsewhere"
        )
    try:
        done = subprocess.run(command, input=render.text(documents), text=True, check=False)
    except FileNotFoundError:
        raise RunError(
            f"{command[0]}: no such command on this machine; install it, or type elsewhere:\n"
            f"  {shlex.join(command)}"
        ) from None
    if action == "submit" and done.returncode == 0:
        from samestep.launch import follow

        follow.print_next_commands(cfg)
    return done.returncode
