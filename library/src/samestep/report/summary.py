"""What a finished run prints: its metrics, its report, and what to type next."""

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
    """The text of a finished run, whose report is written after it.

    The commands of ``summary.next`` need a checkpoint, so a run that has left none names none.
    """
    run = read_run(run_dir)
    facts = facts_of(run)
    width = max(map(len, facts))
    lines = [f"Finished: {run_dir}", *(f"  {name:<{width}}  {facts[name]}" for name in facts)]
    if run.config.get("report"):
        lines += ["Report", f"  {run_dir / REPORT}"]
    lines.append("Next")
    if (run_dir / f"checkpoints/{directory.tested_checkpoint(run_dir)}.ckpt").exists():
        # The run directory in a command is quoted as a shell needs it.
        name = str(run.config.get("run_dir", run_dir))
        commands = select(run.config, "summary.next") or []
        lines += [f"  {command.replace(name, shlex.quote(name))}" for command in commands]
    again = command_to_go_on(run.config, run_dir, metrics.count_epochs(run.rows))
    return "\n".join([*lines, f"  {again}"])


def facts_of(run: Run) -> dict[str, str]:
    """The first things that a reader wants to know: data, model, results, and what they cost."""
    choices = {name: select(run.config, f"choices.{name}") for name in ("data", "model")}
    facts = {name: str(choice) for name, choice in choices.items() if choice}
    facts["epochs"] = str(metrics.count_epochs(run.rows))
    tested = [name for name in sorted(run.figures) if metrics.is_of_test(name)]
    for name in tested:
        # A part of another one, such as test/score_cat beside test/score, is in metrics.json.
        if not name.startswith(tuple(f"{other}_" for other in tested)):
            facts[name] = show(run.figures[name])
    if run.status.best is not None:
        facts[run.status.monitor] = f"{show(run.status.best)} in epoch {run.status.best_epoch}"
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
        num_epochs: of a finished run, which is then trained for as many epochs more; with twice the
            patience if early stopping has ended it. None, or 0, for a run to which its own limits
            apply.
    """
    known = record.read(run_dir)
    command = known.start.get("command")
    words = [str(word) for word in command[1:]] if isinstance(command, list) else []
    if num_epochs:
        limit = max(num_epochs, select(config, "trainer.max_epochs") or 0)
        longer = {"trainer.max_epochs": limit + num_epochs}
        for key in known.limits if num_epochs < limit else ():
            # A patience that is Lightning's default is no key that a command line may change.
            if key.endswith(".patience") and (patience := select(config, key)) is not None:
                longer[key] = 2 * max(1, patience)
        given = ("trainer.max_", *(f"{key}=" for key in longer))
        words = [word for word in words if not word.startswith(given)]
        words += [f"{key}={number}" for key, number in longer.items()]
    name = run_dir.name
    if Path(select(config, "run_dir") or "").name == name:
        # With run_dir=... the name of the directory need not be that of the run.
        name = select(config, "run_id") or name
    cluster = select(config, "cluster.name") or "local"
    # A command such as `python train.py cluster=k8s` may also be typed on a machine of one's own.
    is_local = cluster == "local" or environment.variable(environment.ON_CLUSTER) is None
    program = ["python", "train.py"] if is_local else ["samestep", "launch"]
    return f"RUN_ID={name} {shlex.join([*program, *words])}"
