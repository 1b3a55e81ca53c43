"""Send a run to a cluster, and follow it there. It takes the same overrides as train.py.

samestep launch cluster=k8s trainer.num_nodes=2 --render     # print the manifests
samestep launch cluster=k8s trainer.num_nodes=2 --check      # find errors, and start nothing
RUN_ID=mine samestep launch cluster=k8s cluster.image=$IMAGE trainer.num_nodes=2
samestep status mine    # the state of the run, of each of its pods or jobs, and why they wait
samestep logs mine      # what all pods or nodes print, until the run ends
samestep cancel mine    # let the run save, and remove it; the same launch resumes it

Without a flag launch submits the run, or resumes it; a second submit changes nothing.

--check   find errors in the configuration; with a cluster, also what it would reject
--render  print what the cluster would get
--data    download the data set in the cluster, into the volume of the runs (cluster=k8s)

IMAGE is what `docker push` published. RUN_ID names the run; without it, the run gets a new name.
The pods run train.py with the same overrides. Where the run was submitted, its name is enough for
status, logs and cancel; elsewhere add its cluster, such as cluster=k8s cluster.namespace=ml.
Exit codes: 0 done, 1 error, or logs of a run that failed, 2 invalid arguments or configuration, or
what the cluster rejects before anything exists.
"""

import shlex
from collections.abc import Sequence
from functools import partial

from omegaconf import DictConfig

from samestep.command_line import Parser
from samestep.errors import ConfigError
from samestep.hydra.compose import check as compose
from samestep.hydra.compose import reject
from samestep.hydra.front_end import name_run
from samestep.hydra.project import choices_of, config_folders, configs_folder
from samestep.launch import check, commands, kubernetes, patch, render, slurm, submissions, volume
from samestep.launch.render import Manifest
from samestep.ranks import environment

FLAGS = ("check", "render", "data")
COMMANDS = ("logs", "status", "cancel")
"""The commands for a run that was submitted."""


def main(argv: Sequence[str]) -> int:
    """Compose, render, check and submit the run that ``argv`` describes; return the exit code."""
    parser = Parser("samestep launch", None)
    parser.add_argument("overrides", nargs="*", default=[])
    parser.set_defaults(action="submit")
    one_of = parser.add_mutually_exclusive_group()
    for flag in FLAGS:
        one_of.add_argument(f"--{flag}", dest="action", action="store_const", const=flag)
    given = parser.parse(argv)
    overrides, action = given.overrides, given.action
    cfg, manifests = prepare(overrides, is_data=action == "data")
    if action == "render":
        print_rendered(cfg, overrides, manifests)
        return 0
    check_run(cfg, manifests, action)
    exit_code = call_cluster(action, cfg, overrides, manifests)
    if action == "submit" and exit_code == 0:
        print_next(cfg, overrides)
    return exit_code


def print_rendered(
    cfg: DictConfig, overrides: Sequence[str], manifests: Sequence[Manifest]
) -> None:
    """Print the manifests of a run, or the command that a cluster without manifests gets."""
    # What is printed is kept in files and in the history of terminals. And others apply it, to a
    # cluster that would only say later that a name is invalid.
    reject([*check.find_secrets(cfg), *check.check_name(cfg)])
    if manifests:
        print(render.text(manifests), end="")
    else:
        print(shlex.join(render.command(cfg, overrides, "submit")))


def print_next(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Save the overrides of a run that was submitted, and print the commands that follow it."""
    words = [cfg.run_id]
    if not submissions.save(cfg.run_id, overrides):
        # Without the file the name alone does not say in which cluster the run is.
        words += overrides
    print("\nNext:")
    for command in COMMANDS:
        print("  " + shlex.join(["samestep", command, *words]), flush=True)


def call_command(command: str, argv: Sequence[str]) -> int:
    """Call one of ``COMMANDS`` for the run that ``argv`` names."""
    parser = Parser(f"samestep {command}", None)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("overrides", nargs="*", default=[])
    given = parser.parse(argv)
    overrides = submissions.load(given.name, given.overrides)
    cfg, manifests = prepare(overrides, given.name)
    return call_cluster(command, cfg, overrides, manifests)


logs = partial(call_command, "logs")
status = partial(call_command, "status")
cancel = partial(call_command, "cancel")


def prepare(
    overrides: Sequence[str], name: str = "", *, is_data: bool = False
) -> tuple[DictConfig, list[Manifest]]:
    """Compose a run, and render its manifests; of a sweep of Slurm compose each trial too.

    Args:
        overrides: as they were typed.
        name: of the run; if it is empty, the name that the run was given, or a new one.
        is_data: prepare the Job that downloads the data of the run instead.
    """
    cfg = compose_for_pods(overrides)
    if is_data:
        made_up = check.make_valid_name(f"data-{cfg.choices.data}")
        cfg.run_id = cfg.run_id or environment.run_id() or made_up
        return cfg, volume.render_job(cfg, overrides)
    is_made_up = not (name or cfg.run_id or environment.run_id())
    cfg.run_id = name or name_run(cfg)
    # The name of a file in configs/ may have capitals or an underscore.
    if is_made_up:
        longest_suffix = cfg.cluster.get("longest_suffix", 0)
        cfg.run_id = check.make_valid_name(cfg.run_id, longest_suffix)
    if "manifest" not in cfg.cluster:
        clusters = set(choices_of(*config_folders())["cluster"]) - {cfg.cluster.name}
        raise ConfigError(
            f"cluster={cfg.cluster.name}: needs no launching, python train.py runs it; "
            f"clusters are {', '.join(sorted(clusters))}"
        )
    # An invalid trial is found now, not when Slurm starts it hours later.
    for trial in cfg.cluster.get("trials", ()):
        compose_for_pods([*overrides, trial])
    manifests = []
    if cfg.cluster.manifest:
        manifests = patch.apply(cfg, render.render(cfg, overrides))
    return cfg, manifests


def compose_for_pods(overrides: Sequence[str]) -> DictConfig:
    """Compose what the pods will compose: they do not have configs/local of this machine."""
    overrides = list(overrides)
    if (configs_folder() / "local").is_dir():
        overrides.append("local=null")
    cfg = compose(overrides)
    reject(render.find_unprintable(cfg))
    return cfg


def check_run(cfg: DictConfig, manifests: Sequence[Manifest], action: str) -> None:
    """Reject a run with errors; print what its user should know before it starts."""
    reject(check.faults(cfg, manifests))
    # The Job of --data is what the notes ask for.
    if action != "data":
        for note in check.notes(cfg):
            print(f"{cfg.run_id}: {note}")
    # --check is also for trying out a cluster, before there is an image.
    if action != "check":
        reject(check.check_examples(cfg))


def call_cluster(
    action: str, cfg: DictConfig, overrides: Sequence[str], manifests: Sequence[Manifest]
) -> int:
    """Do ``action`` by the cluster's command, Slurm's or kubectl; return the exit code."""
    if "commands" in cfg.cluster:
        return commands.call(action, cfg, overrides, manifests)
    if cfg.cluster.name == "slurm":
        return slurm.ACTIONS[action](cfg, manifests)
    if action == "submit":
        return kubernetes.submit(cfg, manifests, overrides)
    return kubernetes.ACTIONS[action](cfg, manifests)
