"""Send a run to a cluster. Takes the words of train.py, and what to do.

python scripts/launch.py cluster=k8s trainer.num_nodes=2                 # print the manifests
python scripts/launch.py cluster=k8s trainer.num_nodes=2 action=check    # look for mistakes
RUN_ID=mine python scripts/launch.py cluster=k8s trainer.num_nodes=2 action=submit
RUN_ID=mine python scripts/launch.py cluster=k8s action=logs             # also status, cancel

action  render  print what the cluster would get; the default
        check   schemas, security, numbers that must agree; then ask the cluster, if there is one
        submit  start the run, or continue it; again, it changes nothing
        logs    of all pods, until the run ends
        status  of each pod, and how far the run has come
        cancel  let the run save, then remove it

RUN_ID names the run; without it, it gets a new name. The pods run train.py with the same words.
Exit codes: 0 done, 1 error, 2 wrong usage or configuration.
"""

import shlex
import subprocess
import sys
from collections.abc import Sequence

from omegaconf import DictConfig

from project.train import fail
from samestep.config.compose import CONFIGS, check
from samestep.config.schema import choices_of, nearest
from samestep.errors import ConfigError, RunError
from samestep.launch import render
from samestep.ranks import environment
from samestep.run.name import name_run

OF_A_RUN = ("logs", "status", "cancel")  # that is there
ACTIONS = ("render", "check", "submit", *OF_A_RUN)


def main(words: Sequence[str]) -> int:
    """Do what ``action=`` says with the run that the other words describe.

    Returns:
        0, 1 or 2, as above.
    """
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return 0
    try:
        action = action_of(words)
        overrides = [word for word in words if not word.startswith("action=")]
        cfg = check(overrides)
        if action in OF_A_RUN and not (cfg.run_id or environment.run_id()):
            raise ConfigError(
                f"RUN_ID: is not set; action={action} needs the name that action=submit printed"
            )
        cfg.run_id = name_run(cfg)
        return act(action, cfg, overrides)
    except ConfigError as error:
        return fail(error, exit_code=2)
    except RunError as error:
        return fail(error, exit_code=1)
    except KeyboardInterrupt:
        return 130  # of logs; the run goes on


def action_of(words: Sequence[str]) -> str:
    """The last ``action=``; ``render`` without one."""
    action = ["render", *(w.removeprefix("action=") for w in words if w.startswith("action="))][-1]
    if action not in ACTIONS:
        near = nearest(action, ACTIONS)
        hint = f"did you mean action={near}? " if near else ""
        raise ConfigError(f"action={action}: no such action; {hint}there is {', '.join(ACTIONS)}")
    return action


def act(action: str, cfg: DictConfig, overrides: Sequence[str]) -> int:
    """Do it; the exit code."""
    if "manifest" not in cfg.cluster:
        others = [name for name in choices_of(CONFIGS)["cluster"] if name != cfg.cluster.name]
        raise ConfigError(
            f"cluster={cfg.cluster.name}: needs no launching, python train.py runs it; "
            f"clusters are {', '.join(others)}"
        )
    documents = render.render(cfg, overrides) if cfg.cluster.manifest else []
    if action == "render":
        print(render.text(documents) if documents else show(cfg, overrides), end="")
        return 0
    from samestep.launch import check as mistakes
    from samestep.launch import kubernetes

    if action in ("check", "submit"):
        mistakes.refuse(mistakes.faults(cfg, documents))
    if action == "submit":
        mistakes.refuse(mistakes.placeholder(cfg))
    if "commands" in cfg.cluster:
        return run(cfg, overrides, action, documents)

    return kubernetes.ACTIONS[action](cfg, documents)


def show(cfg: DictConfig, overrides: Sequence[str]) -> str:
    """The command that submits the run, as a line for a shell."""
    return shlex.join(render.command(cfg, overrides, "submit")) + "\n"


def run(
    cfg: DictConfig, overrides: Sequence[str], action: str, documents: Sequence[render.Document]
) -> int:
    """Execute the target's own command, which reads the documents."""
    if action == "check":
        print(f"{cfg.run_id}: no mistakes found")
        return 0
    words = render.command(cfg, overrides, action)
    if not words:
        raise ConfigError(
            f"cluster={cfg.cluster.name} action={action}: nothing on this machine does that; "
            "action=render prints what to type elsewhere"
        )
    try:
        return subprocess.run(
            words, input=render.text(documents), text=True, check=False
        ).returncode
    except FileNotFoundError:
        raise RunError(
            f"{words[0]}: no such command on this machine; install it, or type elsewhere:\n"
            f"  {shlex.join(words)}"
        ) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
