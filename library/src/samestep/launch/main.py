"""Send a run to a cluster. It takes the same overrides as train.py.

samestep launch cluster=k8s trainer.num_nodes=2 --render     # print the manifests
samestep launch cluster=k8s trainer.num_nodes=2 --check      # find errors, and start nothing
RUN_ID=mine samestep launch cluster=k8s cluster.image=$IMAGE trainer.num_nodes=2
samestep logs mine                                           # also status, cancel

Without a flag it submits the run, or continues it; a second submit changes nothing.

--check   check the configuration; then ask the cluster, if there is one, whether it would accept it
--render  print what the cluster would get
--data    download the data set in the cluster, into the volume of the runs (cluster=k8s)

IMAGE is what `docker push` published. RUN_ID names the run; without it, the run gets a new name.
The pods run train.py with the same overrides.
Exit codes: 0 done, 1 error, 2 invalid arguments or configuration.
"""

import shlex
import subprocess
from collections.abc import Sequence

from omegaconf import DictConfig

from samestep.command_line import Parser
from samestep.errors import ConfigError, RunError
from samestep.hydra.compose import check as compose
from samestep.hydra.folder import configs_folder
from samestep.hydra.name import name_run
from samestep.hydra.schema import choices_of
from samestep.launch import check, kubernetes, render, slurm, submitted, volume
from samestep.launch.render import Document

FLAGS = ("check", "render", "data")
COMMANDS = ("logs", "status", "cancel")
"""The commands for a run that was submitted."""


def main(argv: Sequence[str]) -> int:
    """Compose, render, check and submit the run that ``argv`` describes; return the exit code.

    Raises:
        ConfigError: if the arguments or the configuration are invalid.
        RunError: if the cluster cannot do it.
    """
    reject_action(argv)
    parser = Parser("samestep launch", None)
    parser.add_argument("overrides", nargs="*", default=[])
    one_of = parser.add_mutually_exclusive_group()
    for flag in FLAGS:
        one_of.add_argument(f"--{flag}", dest="action", action="store_const", const=flag)
    given = parser.parse(argv)
    overrides, action = given.overrides, given.action or "submit"
    cfg, documents = prepare(overrides, is_data=action == "data")
    if action == "render":
        print_documents(cfg, overrides, documents)
        return 0
    check_run(cfg, documents, action)
    exit_code = call_cluster(action, cfg, overrides, documents)
    if action == "submit" and exit_code == 0:
        words = [] if submitted.remember(cfg.run_id, overrides) else overrides
        print("\nNext:")
        for command in COMMANDS:
            print("  " + shlex.join(["samestep", command, cfg.run_id, *words]), flush=True)
    return exit_code


def status(argv: Sequence[str]) -> int:
    """Print the state of a run, of each of its pods or jobs, and how far it has come.

    samestep status NAME [OVERRIDES...]

    Where the run was submitted its NAME is enough. Elsewhere add its cluster, such as cluster=k8s
    cluster.namespace=ml.
    """
    return call_command("status", argv)


def logs(argv: Sequence[str]) -> int:
    """Print what all pods or nodes of a run print, until the run ends.

    samestep logs NAME [OVERRIDES...]

    Where the run was submitted its NAME is enough. Elsewhere add its cluster, such as cluster=k8s
    cluster.namespace=ml.
    Exit codes: 0 the run succeeded, 1 it failed or was removed.
    """
    return call_command("logs", argv)


def cancel(argv: Sequence[str]) -> int:
    """Let a run save, and then remove it from its cluster; the same submit continues it.

    samestep cancel NAME [OVERRIDES...]

    Where the run was submitted its NAME is enough. Elsewhere add its cluster, such as cluster=k8s
    cluster.namespace=ml.
    """
    return call_command("cancel", argv)


def call_command(command: str, argv: Sequence[str]) -> int:
    """Do what one of ``COMMANDS`` says with the run that ``argv`` names."""
    reject_action(argv)
    parser = Parser(f"samestep {command}", None)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("overrides", nargs="*", default=[])
    given = parser.parse(argv)
    overrides = submitted.recall(given.name, given.overrides)
    cfg, documents = prepare(overrides, given.name)
    return call_cluster(command, cfg, overrides, documents)


def reject_action(argv: Sequence[str]) -> None:
    """Name the command that has taken the place of ``action=``."""
    for word in argv:
        action = word.removeprefix("action=")
        if action == word:
            continue
        flags = {flag: f"samestep launch --{flag} OVERRIDES..." for flag in FLAGS}
        commands = {name: f"samestep {name} NAME" for name in COMMANDS}
        new = (flags | commands).get(action, "samestep launch OVERRIDES...")
        raise ConfigError(f"{word}: there is no action= any more; type {new}")


def prepare(
    overrides: Sequence[str], name: str = "", *, is_data: bool = False
) -> tuple[DictConfig, list[Document]]:
    """Compose a run, and render its documents.

    Of a sweep of Slurm each trial is composed too.

    Args:
        overrides: of train.py, as they were typed.
        name: of the run; empty: the name that it was given, or a new one.
        is_data: prepare the Job that downloads the data of the run instead.

    Raises:
        ConfigError: if the configuration of the run or of a trial is invalid, or needs no cluster.
    """
    cfg = compose_for_pods(overrides)
    if is_data:
        cfg.run_id = volume.name_job(cfg)
        return cfg, volume.render_job(cfg, overrides)
    cfg.run_id = name or name_run(cfg)
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
    return cfg, render.render(cfg, overrides) if cfg.cluster.manifest else []


def compose_for_pods(overrides: Sequence[str]) -> DictConfig:
    """Compose what the pods will compose: they do not have configs/local of this machine.

    Raises:
        ConfigError: if the configuration is invalid, or a text of it would become lines of a
            script.
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
    # What is printed is kept in files and in the history of terminals.
    check.reject(check.find_secrets(cfg))
    if documents:
        print(render.text(documents), end="")
    else:
        print(shlex.join(render.command(cfg, overrides, "submit")))


def check_run(cfg: DictConfig, documents: Sequence[Document], action: str) -> None:
    """Reject a run with errors; print what its user should know before it starts."""
    check.reject(check.faults(cfg, documents))
    if action != "data":
        for note in check.notes(cfg):
            print(f"{cfg.run_id}: {note}")
    if action != "check":
        check.reject(check.check_examples(cfg))


def call_cluster(
    action: str, cfg: DictConfig, overrides: Sequence[str], documents: Sequence[Document]
) -> int:
    """Do ``action`` by the cluster's command, Slurm's or kubectl; return the exit code."""
    if "commands" in cfg.cluster:
        return run_command(action, cfg, overrides, documents)
    actions = slurm.ACTIONS if cfg.cluster.name == "slurm" else kubernetes.ACTIONS
    return actions[action](cfg, documents)


def run_command(
    action: str, cfg: DictConfig, overrides: Sequence[str], documents: Sequence[Document]
) -> int:
    """Run the cluster's own command, which reads the documents; return its exit code."""
    if action == "check":
        print(f"{cfg.run_id}: no errors found; cluster={cfg.cluster.name} was not checked")
        return 0
    command = render.command(cfg, overrides, action)
    if not command:
        raise ConfigError(
            f"cluster={cfg.cluster.name}: nothing on this machine can {action} its runs; "
            "samestep launch --render prints what to type elsewhere"
        )
    try:
        done = subprocess.run(command, input=render.text(documents), text=True, check=False)
    except FileNotFoundError:
        raise RunError(
            f"{command[0]}: no such command on this machine; install it, or type elsewhere:\n"
            f"  {shlex.join(command)}"
        ) from None
    return done.returncode
