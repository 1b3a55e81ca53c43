"""What a finished run prints: its metrics, its files, and what to type next."""

import re
import shlex
import statistics
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from samestep.ranks import environment
from samestep.run import state
from samestep.run.changes import MAY_CHANGE, find_patience, read_config
from samestep.run.records import read_attempts, read_history, read_json
from samestep.spec import select

REPORT = "report.html"

Rows = list[dict[str, float]]
Config = Mapping[str, Any]


def summarize(run_dir: Path, seconds: float | None = None) -> str:
    """Metrics, files and commands, as ``summary`` in the configuration says.

    A file that the run has not left is not named. The report is written after this text.

    Args:
        run_dir: directory of a finished run.
        seconds: how long this process trained; None leaves the line out.
    """
    config = read_config(run_dir)
    rows = read_history(run_dir)
    num_epochs = count_epochs(rows)
    facts = {"epochs": str(num_epochs)}
    facts |= final_metrics(config, read_json(run_dir / "metrics.json", dict) or {})
    facts |= best_epoch(state.read(run_dir))
    if seconds is not None:
        facts["time"] = f"{timedelta(seconds=round(seconds))} h:m:s"
    facts |= speeds_in_words(rows)

    look_at = files_to_look_at(config, run_dir)
    paths = {name: f"{run_dir}/{name}" for name in look_at}
    width = max(map(len, paths.values()), default=0)
    return "\n".join(
        [
            f"Finished: {run_dir}",
            *(f"  {name:<14} {fact}" for name, fact in facts.items()),
            *(["Look at"] if look_at else []),
            *(f"  {path:<{width}}     {look_at[name]}" for name, path in paths.items()),
            "Next",
            *(f"  {command}" for command in next_commands(config, run_dir)),
            f"  {command_to_go_on(config, run_dir, num_epochs)}",
        ]
    )


def files_to_look_at(config: Config, run_dir: Path) -> dict[str, str]:
    """The files of ``summary.look_at`` that the run has left, and what they show."""
    look_at = select(config, "summary.look_at") or {}
    is_written = {REPORT: bool(select(config, "report"))}
    return {
        str(name): str(text)
        for name, text in look_at.items()
        if is_written.get(name, (run_dir / name).exists())
    }


def next_commands(config: Config, run_dir: Path) -> list[str]:
    """The commands of ``summary.next`` and, if the run has left their file, ``summary.next_if``.

    They need a checkpoint, so a run that has left none names none of them. The run directory in
    them is quoted as a shell needs it.
    """
    if not (run_dir / "checkpoints" / f"{state.tested_checkpoint(run_dir)}.ckpt").exists():
        return []
    needed_files = select(config, "summary.next_if") or {}
    commands = [
        *(select(config, "summary.next") or []),
        *(command for name, command in needed_files.items() if (run_dir / name).exists()),
    ]
    name = str(config["run_dir"])
    return [str(command).replace(name, shlex.quote(name)) for command in commands]


def count_epochs(rows: Rows) -> int:
    """How many epochs the run was trained."""
    return int(max((row.get("epoch", -1) for row in trained_rows(rows)), default=-1)) + 1


def count_steps(rows: Rows) -> int:
    """How many optimizer steps the run was trained."""
    return int(max((row["step"] for row in trained_rows(rows)), default=-1)) + 1


def trained_rows(rows: Rows) -> Rows:
    """The rows that were written while training, not by a validation or a test."""
    # A module may name its metrics as it likes; `time/epoch_s` is that of each epoch.
    own = ("train/", "time/")
    return [row for row in rows if any(name.startswith(own) for name in row)]


def final_metrics(config: Config, metrics: Mapping[str, Any]) -> dict[str, str]:
    """The metrics of ``metrics.json`` that ``summary.metrics`` names."""
    names = select(config, "summary.metrics") or []
    # A damaged file may hold anything.
    return {n: f"{metrics[n]:.4f}" for n in names if isinstance(metrics.get(n), int | float)}


def best_epoch(status: state.Status) -> dict[str, str]:
    """The value of the weights in ``best.ckpt``, and its epoch, in words."""
    if status.best is None:
        return {}
    # A run of an older version has not written down its epoch.
    epoch = "" if status.best_epoch is None else f" in epoch {status.best_epoch}"
    return {status.monitor: f"{status.best:.4f}{epoch}"}


def speeds(rows: Rows) -> dict[str, float]:
    """The median of each ``train/<things>_per_second``, as ``{"<things>/s": 5000.0}``."""
    prefix, suffix = "train/", "_per_second"
    names = {name for row in rows for name in row}
    return {
        f"{name.removeprefix(prefix).removesuffix(suffix)}/s": (
            statistics.median(row[name] for row in rows if name in row)
        )
        for name in sorted(names)
        if name.startswith(prefix) and name.endswith(suffix)
    }


def speeds_in_words(rows: Rows) -> dict[str, str]:
    """The speeds, for a reader."""
    return {name: f"{speed:,.0f}" for name, speed in speeds(rows).items()}


def words_for_longer(config: Config, num_epochs: int) -> list[str]:
    """The arguments that train a finished run of so many epochs for twice as many."""
    max_epochs = select(config, "trainer.max_epochs") or 0
    max_steps = select(config, "trainer.max_steps") or -1
    if num_epochs >= max_epochs:
        return [f"trainer.max_epochs={2 * num_epochs}"]
    # Something else has ended it before. Without a limit of steps it still has epochs left.
    limit = max(2 * num_epochs, max_epochs) if max_steps == -1 else 2 * num_epochs
    words = [f"trainer.max_epochs={limit}"]
    changed = {
        key: 2 * max(1, patience)
        for key, patience in find_patience(config).items()
        if select(config, key) is not None
    }
    words += [f"{key}={patience}" for key, patience in changed.items()]
    if others := [key for key in changed if not re.fullmatch("|".join(MAY_CHANGE), key)]:
        words.append(f"allow_changes=[{','.join(others)}]")
    return words


def command_to_go_on(config: Config, run_dir: Path, num_epochs: int | None) -> str:
    """The command that continues the run, where it was started before.

    Args:
        config: the configuration of the run.
        run_dir: its directory.
        num_epochs: of a finished run, which is trained for twice as many; if there are none, as
            configs/ says. If early stopping ended it, its patience is doubled. None for a run that
            was interrupted, to which its own limits apply.
    """
    attempts = read_attempts(run_dir / "logs")
    command = attempts[-1].get("command") if attempts else None
    words = [str(word) for word in command[1:]] if isinstance(command, list) else []
    if num_epochs is not None:
        longer = words_for_longer(config, num_epochs) if num_epochs else []
        given = {word.split("=")[0] for word in longer}
        words = [
            word
            for word in words
            if not word.startswith("trainer.max_") and word.split("=")[0] not in given
        ] + longer
    name = run_dir.name
    if Path(select(config, "run_dir") or "").name == name:
        # With run_dir=... the name of the directory need not be that of the run.
        name = select(config, "run_id") or name
    cluster = select(config, "cluster.name") or "local"
    # A command such as `python train.py cluster=k8s` may also be typed on a machine of one's own.
    if cluster == "local" or environment.variable(environment.ON_CLUSTER) is None:
        return f"RUN_ID={name} {shlex.join(['python', 'train.py', *words])}"
    # Each machine has a Docker of its own, so only somebody who sits there can start the run.
    action = "render" if cluster == "docker" else "submit"
    again = shlex.join(["samestep", "launch", *words, f"action={action}"])
    return f"RUN_ID={name} {again}"
