"""What a finished run prints: its metrics, its files, and what to type next."""

import shlex
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.ranks import environment
from samestep.report.files import Run, read_run, show
from samestep.run import directory, metrics, record
from samestep.spec import select

REPORT = "report.html"
USE = {"system/cpu_cores": "CPU cores in use", "system/memory_gib": "memory, GiB",
       "system/gpu_memory_gib": "GPU memory, GiB"}  # fmt: skip


def summarize(run_dir: Path) -> str:
    """Metrics, files and commands, as ``summary`` in the configuration says.

    A file that the run has not left is not named. The report is written after this text. The
    commands of ``summary.next`` and ``summary.next_if`` need a checkpoint, so a run that has left
    none names none of them.
    """
    run = read_run(run_dir)
    facts = facts_of(run)

    def is_there(name: str) -> bool:
        return bool(select(run.config, "report")) if name == REPORT else (run_dir / name).exists()

    look_at = select(run.config, "summary.look_at") or {}
    files = {f"{run_dir}/{name}": text for name, text in look_at.items() if is_there(name)}
    commands: list[str] = []
    if is_there(f"checkpoints/{directory.tested_checkpoint(run_dir)}.ckpt"):
        next_if = select(run.config, "summary.next_if") or {}
        commands += select(run.config, "summary.next") or []
        commands += [command for name, command in next_if.items() if is_there(name)]
    # The run directory in a command is quoted as a shell needs it.
    name = str(run.config.get("run_dir", run_dir))
    commands = [str(command).replace(name, shlex.quote(name)) for command in commands]
    commands.append(command_to_go_on(run.config, run_dir, metrics.count_epochs(run.rows)))
    length, width = max(14, *map(len, facts)), max(map(len, files), default=0)
    lines = [
        f"Finished: {run_dir}",
        *(f"  {name:<{length}} {fact}" for name, fact in facts.items()),
    ]
    lines += ["Files"] if files else []
    lines += [f"  {path:<{width}}     {text}" for path, text in files.items()]
    return "\n".join([*lines, "Next", *(f"  {command}" for command in commands)])


def facts_of(run: Run) -> dict[str, str]:
    """The first things that a reader wants to know: data, model, results, and what they cost."""
    choices = {name: select(run.config, f"choices.{name}") for name in ("data", "model")}
    facts = {name: str(choice) for name, choice in choices.items() if choice}
    facts["epochs"] = str(metrics.count_epochs(run.rows))
    tested = [name for name in sorted(run.figures) if metrics.is_of_test(name)]
    for name in tested:
        # A part of another one, such as test/score_cat beside test/score, is in metrics.json.
        if not any(name.startswith(f"{other}_") for other in tested):
            facts[name] = show(run.figures[name])
    if run.status.best is not None:
        epoch = "" if run.status.best_epoch is None else f" in epoch {run.status.best_epoch}"
        facts[run.status.monitor] = f"{show(run.status.best)}{epoch}"
    if seconds := run.figures.get("time/total_s"):
        facts["training time"] = f"{seconds:,.1f} s"
    facts |= {name: show(speed) for name, speed in metrics.speeds(run.rows).items()}
    for column, name in USE.items():
        if values := [row[column] for row in run.rows if column in row]:
            facts[name] = f"{statistics.median(values):.1f}"
    return facts


def command_to_go_on(config: Mapping[str, Any], run_dir: Path, num_epochs: int | None) -> str:
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
        patience = [key for key in known.limits if key.endswith(".patience")]
        for key in patience if num_epochs < max_epochs else ():
            # One that is Lightning's default is no key that a command line may change.
            if (epochs := select(config, key)) is not None:
                longer[key] = 2 * max(1, epochs)
        given = ("trainer.max_", *(f"{key}=" for key in longer))
        words = [word for word in words if not word.startswith(given)]
        words += [f"{key}={number}" for key, number in longer.items()]
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
