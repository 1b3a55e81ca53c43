"""What a finished run prints: its metrics, its report, and the next commands."""

import shlex
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.plugins.receipt_files import DIFFERENT, NOT_COMPARED, ROUNDED
from samestep.ranks import environment
from samestep.report.files import Run, read_run, show
from samestep.run import manifest, metrics, record
from samestep.run.layout import shorten
from samestep.run_spec import select

REPORT = "report.html"
USAGE = {
    "system/cpu_cores": "CPU cores in use",
    "system/memory_gib": "memory, GiB",
    "system/gpu_memory_gib": "GPU memory, GiB",
}


def summarize(run_dir: Path) -> str:
    """The text of a finished run, whose report is written afterwards.

    The commands of ``summary.next`` need a checkpoint; without one, they are left out.
    """
    run = read_run(run_dir)
    facts = facts_of(run)
    width = max(map(len, facts))
    lines = [f"Finished: {shorten(run_dir)}"]
    for name, fact in facts.items():
        lines.append(f"  {name:<{width}}  {fact}")
    if run.config.get("report"):
        lines += ["Report", f"  {shorten(run_dir) / REPORT}"]
    lines.append("Next")
    num_epochs = metrics.count_epochs(run.rows)
    for command in [*next_commands(run), resume_command(run.config, run.run_dir, num_epochs)]:
        lines.append(f"  {command}")
    return "\n".join(lines)


def next_commands(run: Run) -> list[str]:
    """The commands of ``summary.next``, if the run has the checkpoint that they need."""
    checkpoint = f"checkpoints/{manifest.tested_checkpoint(run.run_dir)}.ckpt"
    if not (run.run_dir / checkpoint).exists():
        return []
    name = str(run.config.get("run_dir", run.run_dir))
    commands = []
    for command in select(run.config, "summary.next") or []:
        # OmegaConf has put the path in, and a path with a space is two arguments for a shell.
        commands.append(command.replace(name, shlex.quote(name)))
    return commands


def facts_of(run: Run) -> dict[str, str]:
    """What a reader wants to know first: data, model, results, and what they cost."""
    facts: dict[str, str] = {}
    for name in ("data", "model"):
        choice = select(run.config, f"choices.{name}")
        if choice:
            facts[name] = str(choice)
    facts["epochs"] = str(metrics.count_epochs(run.rows))
    facts |= show_test_metrics(run)
    if run.status.best is not None:
        facts[run.status.monitor] = f"{show(run.status.best)} in epoch {run.status.best_epoch}"
    facts |= show_last_losses(run.rows)
    seconds = run.final_metrics.get("time/total_s")
    if seconds:
        facts["training time"] = f"{seconds:,.1f} s"
    # Each start names a slow rank again.
    slow: dict[str, None] = {}
    for entry in run.status.slow_ranks:
        slow[f"{entry.get('rank')} ({entry.get('cause')})"] = None
    if slow:
        facts["slow ranks"] = ", ".join(slow)
    for repeat in run.status.repeats:
        # The first difference explains the later ones.
        if repeat.get("result") == DIFFERENT:
            facts.setdefault("repeated steps", repeat["note"])
    return facts | show_speeds(run) | show_usage(run)


def describe_repeat(repeat: Mapping[str, Any]) -> str:
    """What was found when a run that was killed repeated batches."""
    note, result = repeat.get("note"), repeat.get("result")
    if result == DIFFERENT:
        return f"{note}"
    if result == NOT_COMPARED:
        return f"{result}: {note}"
    text = f"{repeat.get('batches')} batches from step {repeat.get('step')} on, {result}"
    if result == ROUNDED:
        text += f"; relative difference of losses {repeat.get('largest')} at most"
    return text


def show_last_losses(rows: metrics.Rows) -> dict[str, str]:
    """The losses of the last epoch, each a mean: of training, and of validation beside it."""
    last: dict[str, float] = {}
    for row in rows:
        # The row that ends an epoch has its time.
        if "time/epoch_s" in row:
            last = row
    means = {}
    for name, value in last.items():
        # A loss that is logged per step has the last step here, and its mean beside it.
        if f"{name}_epoch" not in last:
            means[name.removesuffix("_epoch")] = value
    for name in sorted(means):
        partner = name.replace("train", "val", 1)
        if "loss" in name.lower() and partner != name and partner in means:
            text = f"{name} {show(means[name])}, {partner} {show(means[partner])}"
            return {"last epoch": text}
    return {}


def show_speeds(run: Run) -> dict[str, str]:
    """The median of each speed."""
    facts = {}
    for name, speed in metrics.speeds(run.rows).items():
        facts[name] = show(speed)
    return facts


def show_usage(run: Run) -> dict[str, str]:
    """The median of the processors and the memory in use."""
    facts = {}
    for column, name in USAGE.items():
        values = [row[column] for row in run.rows if column in row]
        if values:
            # Not the mean: the first epoch includes the start of workers and compilation.
            facts[name] = f"{statistics.median(values):.1f}"
    return facts


def show_test_metrics(run: Run) -> dict[str, str]:
    """The final metrics of the test, without details of another metric."""
    names = sorted(filter(metrics.is_of_test, run.final_metrics))
    prefixes = tuple(f"{name}_" for name in names)
    facts = {}
    for name in names:
        # test/score_cat beside test/score: there can be a hundred, and metrics.json has them all.
        if not name.startswith(prefixes):
            facts[name] = show(run.final_metrics[name])
    return facts


def resume_command(config: Mapping[str, Any], run_dir: Path, num_epochs: int | None) -> str:
    """The command that resumes the run, typed in the folder where it was started.

    Args:
        config: the configuration of the run.
        run_dir: its directory.
        num_epochs: epochs of a finished run, which the command trains for as many more; with twice
            the patience if early stopping ended it. None or 0 keeps the limits of the run.
    """
    status = record.read(run_dir)
    arguments: list[str] = []
    command = status.start.get("command")
    if isinstance(command, list):
        for word in map(str, command[1:]):
            # The name is before the command: a typed one would win, also where the run has moved.
            if not word.startswith("run_id="):
                arguments.append(word)
    if num_epochs:
        arguments = raise_limits(arguments, config, num_epochs)
    program = ["samestep", "launch"] if is_launched(config) else ["python", "train.py"]
    return f"RUN_ID={run_id_of(config, run_dir)} {shlex.join([*program, *arguments])}"


def raise_limits(arguments: list[str], config: Mapping[str, Any], num_epochs: int) -> list[str]:
    """The arguments with limits that allow ``num_epochs`` more epochs."""
    max_epochs = max(num_epochs, select(config, "trainer.max_epochs") or 0)
    limits = {"trainer.max_epochs": max_epochs + num_epochs}
    # With all epochs trained, early stopping did not end the run, and its patience may stay.
    if num_epochs < max_epochs:
        limits |= doubled_patience(config)
    # max_steps and max_time would end the run at once, so all trainer.max_* are removed.
    replaced = ["trainer.max_"]
    raised = []
    for key, number in limits.items():
        replaced.append(f"{key}=")
        raised.append(f"{key}={number}")
    kept = [argument for argument in arguments if not argument.startswith(tuple(replaced))]
    return kept + raised


def doubled_patience(config: Mapping[str, Any]) -> dict[str, int]:
    """Twice the patience of each early stopping whose patience stands in the configuration."""
    longer = {}
    for name, node in (select(config, "callbacks") or {}).items():
        patience = select(node, "patience")
        # Lightning's default has no key in the configuration, so an override would be an error.
        if patience is not None:
            longer[f"callbacks.{name}.patience"] = 2 * max(1, patience)
    return longer


def run_id_of(config: Mapping[str, Any], run_dir: Path) -> str:
    """The ``RUN_ID`` that finds the run again."""
    configured = Path(select(config, "run_dir") or "")
    # A directory that was moved or copied is resumed where it is now, under its present name.
    if configured.name != run_dir.name:
        return run_dir.name
    # With run_dir=... on the command line, the directory can have another name than the run.
    return select(config, "run_id") or run_dir.name


def is_launched(config: Mapping[str, Any]) -> bool:
    """Whether ``samestep launch`` started the run on a cluster."""
    has_cluster = select(config, "cluster.name") not in (None, "local")
    # `python train.py cluster=k8s` can also be typed on a workstation; only the entry point of a
    # launched node sets the variable.
    return has_cluster and environment.variable(environment.ON_CLUSTER) is not None
