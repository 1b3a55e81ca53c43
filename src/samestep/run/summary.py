"""What a finished run prints: its metrics, its files, and what to type next."""

import math
import shlex
import statistics
from datetime import timedelta
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from samestep.ranks import environment
from samestep.run.changes import find_patience, pattern_of_changes, read_config
from samestep.run.records import read_attempts, read_history, read_json

REPORT = "report.html"

Rows = list[dict[str, float]]


def summarize(run_dir: Path, seconds: float | None = None) -> str:
    """Metrics, files and commands, as ``summary`` in the configuration says.

    A file that the run has not left is not named. The report is written after this text.

    Args:
        run_dir: directory of a finished run.
        seconds: how long this process trained; None leaves the line out.
    """
    cfg = read_config(run_dir)
    rows = read_history(run_dir)
    num_epochs = count_epochs(rows)
    facts = {"epochs": str(num_epochs)}
    facts |= final_metrics(cfg, run_dir)
    facts |= best_epoch(cfg, rows)
    if seconds is not None:
        facts["time"] = f"{timedelta(seconds=round(seconds))} h:m:s"
    facts |= speeds_in_words(rows)

    look_at = files_to_look_at(cfg, run_dir)
    paths = {name: f"{run_dir}/{name}" for name in look_at}
    width = max(map(len, paths.values()), default=0)
    return "\n".join(
        [
            f"Finished: {run_dir}",
            *(f"  {name:<14} {fact}" for name, fact in facts.items()),
            *(["Look at"] if look_at else []),
            *(f"  {path:<{width}}     {look_at[name]}" for name, path in paths.items()),
            "Next",
            *(f"  {command}" for command in next_commands(cfg, run_dir)),
            f"  {command_to_go_on(cfg, run_dir, num_epochs)}",
        ]
    )


def files_to_look_at(cfg: DictConfig, run_dir: Path) -> dict[str, str]:
    """The files of ``summary.look_at`` that the run has left, and what they show."""
    look_at = OmegaConf.select(cfg, "summary.look_at") or {}
    is_written = {REPORT: bool(OmegaConf.select(cfg, "report"))}
    return {
        str(name): str(text)
        for name, text in look_at.items()
        if is_written.get(name, (run_dir / name).exists())
    }


def next_commands(cfg: DictConfig, run_dir: Path) -> list[str]:
    """The commands of ``summary.next`` and, if the run has left their file, ``summary.next_if``.

    The run directory in them is quoted as a shell needs it.
    """
    needed_files = OmegaConf.select(cfg, "summary.next_if") or {}
    commands = [
        *(OmegaConf.select(cfg, "summary.next") or []),
        *(command for name, command in needed_files.items() if (run_dir / name).exists()),
    ]
    name = str(cfg.run_dir)
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


def final_metrics(cfg: DictConfig, run_dir: Path) -> dict[str, str]:
    """The metrics of ``metrics.json`` that ``summary.metrics`` names."""
    metrics = read_json(run_dir / "metrics.json", dict) or {}
    names = OmegaConf.select(cfg, "summary.metrics") or []
    # A damaged file may hold anything.
    return {n: f"{metrics[n]:.4f}" for n in names if isinstance(metrics.get(n), int | float)}


def best_epoch(cfg: DictConfig, rows: Rows) -> dict[str, str]:
    """The best value of the monitored metric, and its epoch, in words."""
    best = find_best(cfg, rows)
    if not best:
        return {}
    return {best["monitor"]: f"{best['best']:.4f} in epoch {best['best_epoch']}"}


def find_best(cfg: DictConfig, rows: Rows) -> dict[str, Any]:
    """The best value of the monitored metric, as ``monitor``, ``best`` and ``best_epoch``."""
    monitor: Any = OmegaConf.select(cfg, "callbacks.best.monitor")
    found = [row for row in rows if not math.isnan(row.get(monitor, math.nan))]
    if not found:
        return {}
    choose = min if OmegaConf.select(cfg, "callbacks.best.mode") == "min" else max
    best = choose(found, key=lambda row: row[monitor])
    epoch = int(best.get("epoch", 0)) + 1
    return {"monitor": monitor, "best": best[monitor], "best_epoch": epoch}


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


def words_for_longer(cfg: DictConfig, num_epochs: int) -> list[str]:
    """The arguments that train a finished run of so many epochs for twice as many."""
    max_epochs = OmegaConf.select(cfg, "trainer.max_epochs") or 0
    max_steps = OmegaConf.select(cfg, "trainer.max_steps") or -1
    if num_epochs >= max_epochs:
        return [f"trainer.max_epochs={2 * num_epochs}"]
    # Something else has ended it before. Without a limit of steps it still has epochs left.
    limit = max(2 * num_epochs, max_epochs) if max_steps == -1 else 2 * num_epochs
    words = [f"trainer.max_epochs={limit}"]
    changed = {
        key: 2 * max(1, patience)
        for key, patience in find_patience(cfg).items()
        if OmegaConf.select(cfg, key) is not None
    }
    words += [f"{key}={patience}" for key, patience in changed.items()]
    may_change = pattern_of_changes(cfg)
    if others := [key for key in changed if not may_change.fullmatch(key)]:
        words.append(f"allow_changes=[{','.join(others)}]")
    return words


def command_to_go_on(cfg: DictConfig, run_dir: Path, num_epochs: int | None) -> str:
    """The command that continues the run, where it was started before.

    Args:
        cfg: the configuration of the run.
        run_dir: its directory.
        num_epochs: of a finished run, which is trained for twice as many; if there are none, as
            configs/ says. If early stopping ended it, its patience is doubled. None for a run that
            was interrupted, to which its own limits apply.
    """
    attempts = read_attempts(run_dir / "logs")
    command = attempts[-1].get("command") if attempts else None
    words = [str(word) for word in command[1:]] if isinstance(command, list) else []
    if num_epochs is not None:
        longer = words_for_longer(cfg, num_epochs) if num_epochs else []
        given = {word.split("=")[0] for word in longer}
        words = [
            word
            for word in words
            if not word.startswith("trainer.max_") and word.split("=")[0] not in given
        ] + longer
    cluster = OmegaConf.select(cfg, "cluster.name") or "local"
    # A command such as `python train.py cluster=k8s` may also be typed on a machine of one's own.
    if cluster == "local" or environment.variable(environment.ON_CLUSTER) is None:
        return f"RUN_ID={run_dir.name} {shlex.join(['python', 'train.py', *words])}"
    # Each machine has a Docker of its own, so only somebody who sits there can start the run.
    action = "render" if cluster == "docker" else "submit"
    again = shlex.join(["python", "scripts/launch.py", *words, f"action={action}"])
    return f"RUN_ID={run_dir.name} {again}"
