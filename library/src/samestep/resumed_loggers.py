"""Lightning's loggers, as a script makes them: a run that continues goes on in the same ones.

::

    take_places    when the Trainer is made: the version, or the id, with which the run has logged
    resume         when training begins: steps that will be trained again are left out
    is_repeated    a test or prediction that the trackers have already

A logger without ``version`` or ``id`` chooses a new one in each process, and ``run.json`` keeps the
choice. TensorBoardLogger hides the repeated steps, CSVLogger removes their rows, MLFlowLogger sends
no value twice. W&B cannot forget a row: after SIGKILL it has some twice, at the same step.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)

from samestep.mlflow_runs import compare_parameters, known_run, read_metrics, tag_changed
from samestep.ranks import compat, environment, epoch_logs
from samestep.run import record
from samestep.run.checkpoint import read_without_tensors
from samestep.run.files import write_text

CSV_FILE = "metrics.csv"
KINDS = CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger


def take_places(loggers: Iterable[Logger], run_dir: Path) -> None:
    """Let each logger go on where the run has logged before; on every rank."""
    named = names_of(loggers)
    if not named:
        return
    known = record.read(run_dir)
    for name, logger in named.items():
        if name not in known.trackers:
            continue
        place, place_before = compat.place_of(logger), known.trackers[name]
        if place is None:
            compat.set_place(logger, place_before)
        elif place != place_before:
            note_other_place(logger, place_before)
            continue
        if isinstance(logger, TensorBoardLogger) and known.step:
            compat.log_no_first_metric(logger)
        if isinstance(logger, CSVLogger) and environment.rank() == 0:
            # Lightning's own would delete the file, also for a test.
            keep_rows(logger)


def note_other_place(logger: Logger, place_before: Any) -> None:
    """Say that a logger has chosen a new place before it could be told; a script may choose it."""
    if compat.is_open(logger) and environment.rank() == 0:
        print(
            f"Note: {type(logger).__name__} was used before the Trainer was made, so it begins "
            f"{logger.version} and does not continue {place_before}",
            flush=True,
        )


def resume(loggers: Iterable[Logger], run_dir: Path, ckpt_path: str | None) -> None:
    """Open the loggers, and leave out what will be logged again; on rank zero only.

    Args:
        loggers: all of the Trainer.
        run_dir: of the run.
        ckpt_path: from which the run continues; None where it begins.
    """
    named = names_of(loggers)
    if not named:
        return
    run = record.read(run_dir)
    known = run.trackers
    step = first_repeated_step(run, ckpt_path)
    places = {}
    for name, logger in named.items():
        if isinstance(logger, WandbLogger | MLFlowLogger):
            # Only then it has an id.
            _ = logger.experiment
        places[name] = logger.version
        if known.get(name) == places[name]:
            leave_out(logger, step)
    record.add(run_dir, trackers=places, evaluated=[])


def note_evaluation(run_dir: Path, stage: str) -> None:
    """Remember that the trackers have the results of a finished run; on rank zero only."""
    known = record.read(run_dir)
    if has_ended(known) and stage not in known.evaluated:
        record.add(run_dir, evaluated=[*known.evaluated, stage])


def is_repeated(run_dir: Path, stage: str) -> bool:
    """Whether the trackers of a finished run have nothing to gain from this evaluation."""
    known = record.read(run_dir)
    # A prediction logs nothing.
    return has_ended(known) and stage in ("predict", *known.evaluated)


def has_ended(known: record.Record) -> bool:
    """Whether a run with loggers of Lightning is finished."""
    return bool(known.trackers) and known.state == record.FINISHED


def names_of(loggers: Iterable[Logger]) -> dict[str, Logger]:
    """Lightning's loggers by names that are the same at the next start."""
    named: dict[str, Logger] = {}
    for logger in loggers:
        kind = kind_of(logger)
        # Those of ``samestep.loggers`` continue by themselves.
        is_ours = type(logger).__module__ == "samestep.loggers"
        if kind is None or is_ours:
            continue
        name = f"{kind.__name__} {compat.project_of(logger)}"
        while name in named:
            name += "'"
        named[name] = logger
    return named


def kind_of(logger: Logger) -> type[Logger] | None:
    """Which of ``KINDS`` a logger is; None for others."""
    return next((kind for kind in KINDS if isinstance(logger, kind)), None)


def first_repeated_step(run: record.Record, ckpt_path: str | None) -> int | None:
    """The first step that will be logged again, as Lightning counts them; None if none will."""
    if ckpt_path is None:
        return 0
    content = read_without_tensors(Path(ckpt_path))
    # What a script logs at ``global_step`` in a validation has the number of the next step.
    if has_stopped_at(run, content["global_step"]):
        return None
    return epoch_logs.num_logged_steps_of(content)


def has_stopped_at(run: record.Record, step: int) -> bool:
    """Whether the process before this one has saved at this step, and stopped there."""
    if not run.ends or len(run.starts) < 2:
        return False
    # The last start is that of this process.
    start, end = run.starts[-2], run.ends[-1]
    is_its_end = record.timestamp(end["time"]) >= record.timestamp(start["started"])
    return is_its_end and (end["state"], end["step"]) == (record.STOPPED, step)


def leave_out(logger: Logger, step: int | None) -> None:
    """Let a logger forget what it has logged from ``step`` on, or leave it out the second time."""
    if isinstance(logger, TensorBoardLogger):
        compat.hide_events_from(logger, step)
    elif isinstance(logger, CSVLogger):
        keep_rows(logger, step)
    elif isinstance(logger, MLFlowLogger):
        send_only_new(logger)
    # W&B can do neither.


def keep_rows(logger: CSVLogger, before: int | None = None) -> None:
    """Let a CSVLogger add to its file; only rows of steps ``before`` this one stay in it."""
    if compat.is_open(logger):
        logger.save()
    path = Path(logger.log_dir, CSV_FILE)
    names: list[str] = []
    if path.is_file():
        with path.open(newline="") as file:
            table = csv.DictReader(file)
            rows = [*table]
        names = [*(table.fieldnames or [])]
        if before is not None:
            write_rows(path, names, [row for row in rows if step_of(row) < before])
    compat.append_to_csv(logger, names)


def write_rows(path: Path, names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a table whole or not at all."""
    text = io.StringIO()
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def step_of(row: Mapping[str, str | None]) -> float:
    """The step of a row; infinite if a killed process has left only a part of the line."""
    is_whole = None not in row.values()
    return float(row["step"] or math.inf) if is_whole else math.inf


def send_only_new(logger: MLFlowLogger) -> None:
    """Let a logger send no value twice, nor a parameter, which MLflow cannot change."""
    client: Any = logger.experiment
    run = known_run(client.get_run(str(logger.version)))
    known = read_metrics(client, run)
    log_batch = client.log_batch

    def log_new(
        run_id: str, metrics: Sequence[Any] = (), params: Sequence[Any] = (), **options: Any
    ) -> None:
        new_metrics = [m for m in metrics if (m.key, m.step, m.value) not in known]
        values = {param.key: param.value for param in params}
        new, changed = compare_parameters(values, run.params)
        tag_changed(client, run_id, changed)
        new_params = [param for param in params if param.key in new]
        log_batch(run_id, metrics=new_metrics, params=new_params, **options)

    client.log_batch = log_new
    client.update_run(run.number, "RUNNING")
