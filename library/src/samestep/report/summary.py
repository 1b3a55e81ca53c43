"""What a finished run prints: its metrics, its files, and what to type next."""

import re
import shlex
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from samestep.ranks import environment
from samestep.run import directory, metrics, record
from samestep.run.changes import read_config
from samestep.spec import select

REPORT = "report.html"
MAX_FIGURES = 8  # of the test; metrics.json and the report have all

Config = Mapping[str, Any]


def summarize(run_dir: Path, seconds: float | None = None) -> str:
    """Metrics, files and commands, as ``summary`` in the configuration says.

    A file that the run has not left is not named. The report is written after this text. The
    commands of ``summary.next`` and ``summary.next_if`` need a checkpoint, so a run that has left
    none names none of them.

    Args:
        run_dir: directory of a finished run.
        seconds: how long this process trained; None leaves the line out.
    """
    config, rows = read_config(run_dir), metrics.read_history(run_dir)
    times = {} if seconds is None else {"time": f"{timedelta(seconds=round(seconds))} h:m:s"}
    figures = metrics.read_figures(run_dir) or {}
    facts = facts_of(config, figures, record.read(run_dir), rows, times)

    def is_there(name: str) -> bool:
        return bool(select(config, "report")) if name == REPORT else (run_dir / name).exists()

    look_at = select(config, "summary.look_at") or {}
    files = {f"{run_dir}/{name}": text for name, text in look_at.items() if is_there(name)}
    width = max(map(len, files), default=0)
    commands = []
    if is_there(f"checkpoints/{directory.tested_checkpoint(run_dir)}.ckpt"):
        next_if = select(config, "summary.next_if") or {}
        commands = list(select(config, "summary.next") or [])
        commands += [command for name, command in next_if.items() if is_there(name)]
    # The run directory in a command is quoted as a shell needs it.
    name = str(config["run_dir"])
    commands = [str(command).replace(name, shlex.quote(name)) for command in commands]
    again = command_to_go_on(config, run_dir, metrics.count_epochs(rows))
    return "\n".join(
        [
            f"Finished: {run_dir}",
            *(f"  {name:<14} {fact}" for name, fact in facts.items()),
            *(["Files"] if files else []),
            *(f"  {path:<{width}}     {text}" for path, text in files.items()),
            "Next",
            *(f"  {command}" for command in [*commands, again]),
        ]
    )


def facts_of(
    config: Config,
    figures: Mapping[str, Any],
    known: record.Record,
    rows: metrics.Rows,
    times: Mapping[str, str],
) -> dict[str, str]:
    """The first things that a reader wants to know: epochs, metrics, best epoch, times, speeds."""
    facts = {"epochs": str(metrics.count_epochs(rows))}
    facts |= {name: f"{value:.4f}" for name, value in figures_of_test(figures).items()}
    if known.best is not None:
        epoch = "" if known.best_epoch is None else f" in epoch {known.best_epoch}"
        facts[known.monitor] = f"{known.best:.4f}{epoch}"
    speeds = {name: f"{speed:,.0f}" for name, speed in metrics.speeds(rows).items()}
    return facts | dict(times) | speeds


def figures_of_test(figures: Mapping[str, Any]) -> dict[str, float]:
    """What the test has logged; of many figures those that are no part of another one."""
    # A damaged file may hold anything.
    found = {
        name: float(value)
        for name, value in sorted(figures.items())
        if re.match("test[/_]", name) and isinstance(value, int | float)
    }
    if len(found) > MAX_FIGURES:  # such as test/score_cat beside test/score
        found = {n: v for n, v in found.items() if not any(n.startswith(f"{o}_") for o in found)}
    return dict(list(found.items())[:MAX_FIGURES])


def command_to_go_on(config: Config, run_dir: Path, num_epochs: int | None) -> str:
    """The command that continues the run, where it was started before.

    Args:
        config: the configuration of the run.
        run_dir: its directory.
        num_epochs: of a finished run, which is trained for twice as many, or as many as it may. If
            it has ended before that, early stopping gets twice its patience. None, or 0, for a run
            to which its own limits apply.
    """
    known = record.read(run_dir)
    command = known.start.get("command")
    words = [str(word) for word in command[1:]] if isinstance(command, list) else []
    if num_epochs:
        max_epochs = select(config, "trainer.max_epochs") or 0
        longer = {"trainer.max_epochs": max(2 * num_epochs, max_epochs)}
        if num_epochs < max_epochs:
            # One that is Lightning's default is no key that a command line may change.
            patience = [key for key in known.limits if key.endswith(".patience")]
            patience = [key for key in patience if select(config, key) is not None]
            longer |= {key: 2 * max(1, select(config, key)) for key in patience}
        kept = [word for word in words if not word.startswith("trainer.max_")]
        kept = [word for word in kept if word.split("=")[0] not in longer]
        words = kept + [f"{key}={number}" for key, number in longer.items()]
    name = run_dir.name
    if Path(select(config, "run_dir") or "").name == name:
        # With run_dir=... the name of the directory need not be that of the run.
        name = select(config, "run_id") or name
    cluster = select(config, "cluster.name") or "local"
    # A command such as `python train.py cluster=k8s` may also be typed on a machine of one's own.
    if cluster == "local" or environment.variable(environment.ON_CLUSTER) is None:
        return f"RUN_ID={name} {shlex.join(['python', 'train.py', *words])}"
    # Each machine has a Docker of its own, so only somebody who sits there can start the run.
    flags = ["--render"] if cluster == "docker" else []
    again = shlex.join(["samestep", "launch", *words, *flags])
    return f"RUN_ID={name} {again}"
