"""Send a run to a cluster. It takes the same overrides as train.py, plus action=.

samestep launch cluster=k8s trainer.num_nodes=2                 # print the manifests
samestep launch cluster=k8s trainer.num_nodes=2 action=check    # look for mistakes
RUN_ID=mine samestep launch cluster=k8s cluster.image=$IMAGE action=submit
RUN_ID=mine samestep launch action=logs                         # also status, cancel

action  render  print what the cluster would get; the default
        check   look for mistakes in the configuration and the manifests; then ask the cluster,
                if there is one, whether it would accept them
        data    download the data set in the cluster, into the volume of the runs (cluster=k8s)
        submit  start the run, or continue it; a second submit changes nothing
        logs    print the logs of all pods until the run ends
        status  print the state of each pod, and how far the run has come
        cancel  let the run save, then remove it

IMAGE is what `samestep image NAME --push` prints. RUN_ID names the run; without it, it
gets a new name. logs, status and cancel need no more than it: submit remembers the overrides in
<run_root>/<run_id>/launch.yaml. The pods run train.py with the same overrides.
Exit codes: 0 done, 1 error, 2 wrong usage or configuration.
"""

import shlex
import subprocess
from collections.abc import Sequence

from omegaconf import DictConfig

from samestep.errors import ConfigError, RunError
from samestep.hydra.compose import check as compose
from samestep.hydra.folder import configs_folder
from samestep.hydra.name import name_run
from samestep.hydra.schema import choices_of, nearest
from samestep.launch import render, submitted
from samestep.launch.render import Document

ACTIONS_ON_EXISTING_RUN = ("logs", "status", "cancel")
ACTIONS = ("render", "check", "data", "submit", *ACTIONS_ON_EXISTING_RUN)


def main(argv: Sequence[str]) -> int:
    """Do what ``action=`` in ``argv`` says with the run that the other words describe.

    Returns:
        0, or the exit code of the cluster's own command.

    Raises:
        ConfigError: if the arguments or the configuration are wrong.
        RunError: if the cluster cannot do it.
    """
    action = parse_action(argv)
    words = [word for word in argv if not word.startswith("action=")]
    return fill_volume(words) if action == "data" else launch(action, words)


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


def launch(action: str, typed: Sequence[str]) -> int:
    """Do ``action`` with the run that ``typed`` describes; return the exit code."""
    if action in ACTIONS_ON_EXISTING_RUN:
        overrides = submitted.recall(submitted.name_of(typed, action), typed)
    else:
        overrides = list(typed)
    cfg = compose_run(overrides)
    documents = render.render(cfg, overrides) if cfg.cluster.manifest else []
    if action == "render":
        print_documents(cfg, overrides, documents)
        return 0
    if action in ("check", "submit"):
        check_run(action, cfg, documents)
    exit_code = call_cluster(action, cfg, overrides, documents)
    if action == "submit" and exit_code == 0:
        print_next_commands(cfg, overrides)
    return exit_code


def compose_run(overrides: Sequence[str]) -> DictConfig:
    """Compose a run for its cluster, and name it; of a sweep of Slurm each trial is composed.

    Raises:
        ConfigError: if the configuration of the run or of a trial is wrong, or needs no cluster.
    """
    cfg = compose_for_pods(overrides)
    cfg.run_id = name_run(cfg)
    if "manifest" not in cfg.cluster:
        others = [
            name for name in choices_of(configs_folder())["cluster"] if name != cfg.cluster.name
        ]
        raise ConfigError(
            f"cluster={cfg.cluster.name}: needs no launching, python train.py runs it; "
            f"clusters are {', '.join(others)}"
        )
    for trial in cfg.cluster.get("trials", ()):
        compose_for_pods([*overrides, trial])
    return cfg


def compose_for_pods(overrides: Sequence[str]) -> DictConfig:
    """Compose what the pods will compose: they do not have configs/local of this machine.

    Raises:
        ConfigError: if the configuration is wrong, or a text of it would become lines of a script.
    """
    has_local = (configs_folder() / "local").is_dir()
    cfg = compose([*overrides, "local=null"] if has_local else overrides)
    if faults := [*render.find_unprintable(cfg)]:
        raise ConfigError("\n".join(faults))
    return cfg


def print_documents(
    cfg: DictConfig, overrides: Sequence[str], documents: Sequence[Document]
) -> None:
    """Print the documents, or the command that submits the run, if they hold no secret."""
    from samestep.launch.check import refuse, secrets

    # What is printed is kept in files and in the history of terminals.
    refuse(secrets.check_secrets_of_configuration(cfg))
    if documents:
        print(render.text(documents), end="")
    else:
        print(shlex.join(render.command(cfg, overrides, "submit")))


def check_run(action: str, cfg: DictConfig, documents: Sequence[Document]) -> None:
    """Refuse a run with mistakes; print what its user should know before it starts."""
    from samestep.launch import check  # takes a third of a second, which wrong usage does not need

    check.refuse(check.faults(cfg, documents))
    for note in check.notes(cfg):
        print(f"{cfg.run_id}: {note}")
    if action == "submit":
        check.refuse(check.check_examples(cfg))


def call_cluster(
    action: str, cfg: DictConfig, overrides: Sequence[str], documents: Sequence[Document]
) -> int:
    """Do ``action`` by the cluster's command, Slurm's or kubectl; return the exit code."""
    if "commands" in cfg.cluster:
        return run_command(cfg, overrides, action, documents)
    from samestep.launch import kubernetes, slurm

    actions = slurm.ACTIONS if cfg.cluster.name == "slurm" else kubernetes.ACTIONS
    return actions[action](cfg, documents)


def print_next_commands(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Remember a run that was submitted; print the commands that follow, describe and cancel it."""
    words = [] if submitted.remember(cfg.run_id, overrides) else list(overrides)
    print("\nNext:")
    for action in ACTIONS_ON_EXISTING_RUN:
        line = shlex.join(["samestep", "launch", *words, f"action={action}"])
        print(f"  RUN_ID={cfg.run_id} {line}", flush=True)


def fill_volume(typed: Sequence[str]) -> int:
    """Download the data set into the volume of the runs, in the cluster; return the exit code."""
    from samestep.launch import check, kubernetes, volume

    cfg = compose_for_pods(typed)
    cfg.run_id = volume.name_job(cfg)
    documents = volume.render_job(cfg, typed)
    check.refuse([*check.faults(cfg, documents), *check.check_examples(cfg)])
    return kubernetes.fill_volume(cfg, documents)


def run_command(
    cfg: DictConfig, overrides: Sequence[str], action: str, documents: Sequence[Document]
) -> int:
    """Run the cluster's own command, which reads the documents; return its exit code."""
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
    return done.returncode
