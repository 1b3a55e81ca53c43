"""Lightning's loggers, as a script makes them: a run that continues goes on in the same ones.

::

    take_places    when the Trainer is made: the version, or the id, with which the run has logged
    resume         when training begins: steps that will be trained again are left out
    is_repeated    a test or prediction that the trackers have already

The private names are those of Lightning 2.6.

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

from lightning.pytorch.core.saving import load_hparams_from_yaml
from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from samestep.mlflow_runs import compare_parameters, known_run, read_metrics, tag_changed
from samestep.plugin import Loggers
from samestep.ranks import environment, epoch_logs
from samestep.run import record
from samestep.run.checkpoint import read_without_tensors
from samestep.run.files import write_text

CSV_FILE = "metrics.csv"
KINDS = CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
PLACES = "_version", "_id", "_run_id"
"""Where Lightning 2.6 keeps what a logger was told, or has chosen: a version, or the id of a run.

The public properties would choose a new one.
"""


def loggers(given: Iterable[Logger], run_dir: Path) -> Loggers | None:
    """For a run that logs to some of Lightning's loggers; None for others."""
    named = names_of(given)
    return Trackers(named, run_dir) if named else None


class Trackers(Loggers):
    """Lightning's loggers of one run.

    Args:
        named: by names that are the same at the next start.
        run_dir: of the run.
    """

    def __init__(self, named: Mapping[str, Logger], run_dir: Path) -> None:
        self.named, self.run_dir = named, run_dir

    def take_places(self) -> None:
        """Let each logger go on where the run has logged before."""
        known = record.read(self.run_dir)
        for name, logger in self.named.items():
            if name not in known.trackers:
                continue
            place, place_before = place_of(logger), known.trackers[name]
            if place is None:
                set_place(logger, place_before)
            elif place != place_before:
                note_other_place(logger, place_before)
                continue
            if isinstance(logger, TensorBoardLogger) and known.step:
                log_no_first_metric(logger)
            if isinstance(logger, CSVLogger) and environment.rank() == 0:
                # Lightning's own would delete the file, also for a test.
                keep_rows(logger)

    def resume(self, ckpt_path: str | None) -> None:
        """Open the loggers, and leave out what will be logged again."""
        run = record.read(self.run_dir)
        known = run.trackers
        step = first_repeated_step(run, ckpt_path)
        places = {}
        for name, logger in self.named.items():
            if isinstance(logger, WandbLogger | MLFlowLogger):
                # Only then it has an id.
                _ = logger.experiment
            places[name] = logger.version
            if known.get(name) == places[name]:
                leave_out(logger, step)
        record.add(self.run_dir, trackers=places, evaluated=[])

    def note_evaluation(self, stage: str) -> None:
        """Remember that the trackers have the results of a finished run."""
        known = record.read(self.run_dir)
        if has_ended(known) and stage not in known.evaluated:
            record.add(self.run_dir, evaluated=[*known.evaluated, stage])

    def is_repeated(self, stage: str) -> bool:
        """Whether the trackers of a finished run have nothing to gain from this evaluation."""
        known = record.read(self.run_dir)
        # A prediction logs nothing.
        return has_ended(known) and stage in ("predict", *known.evaluated)


def note_other_place(logger: Logger, place_before: Any) -> None:
    """Say that a logger has chosen a new place before it could be told; a script may choose it."""
    if is_open(logger) and environment.rank() == 0:
        print(
            f"Note: {type(logger).__name__} was used before the Trainer was made, so it begins "
            f"{logger.version} and does not continue {place_before}",
            flush=True,
        )


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
        name = f"{kind.__name__} {project_of(logger)}"
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
        hide_events_from(logger, step)
    elif isinstance(logger, CSVLogger):
        keep_rows(logger, step)
    elif isinstance(logger, MLFlowLogger):
        send_only_new(logger)
    # W&B can do neither.


def keep_rows(logger: CSVLogger, before: int | None = None) -> None:
    """Let a CSVLogger add to its file; only rows of steps ``before`` this one stay in it."""
    if is_open(logger):
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
    append_to_csv(logger, names)


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


def place_of(logger: Any) -> Any:
    """The version of a logger on disk, or the id of W&B or MLflow; None if it will be a new one."""
    if is_open(logger):
        return logger.version
    return next(getattr(logger, name) for name in PLACES if hasattr(logger, name))


def set_place(logger: Any, place: Any) -> None:
    """Let a logger that was not used yet log there."""
    for name in PLACES:
        if hasattr(logger, name):
            setattr(logger, name, place)
    # The arguments of wandb.init.
    if hasattr(logger, "_wandb_init"):
        logger._wandb_init["id"] = place


def project_of(logger: Any) -> str:
    """What tells a logger from others of its kind: its folder, project or experiment."""
    if hasattr(logger, "_experiment_name"):  # of MLflow, whose public name creates a run
        return f"{logger._tracking_uri} {logger._experiment_name}"
    return str(getattr(logger, "root_dir", None) or logger.name)


def is_open(logger: Any) -> bool:
    """Whether a logger was used; the public ``experiment`` of Lightning 2.6 would open it."""
    experiment = getattr(logger, "_experiment", None)
    return experiment is not None or getattr(logger, "_initialized", False)


def log_no_first_metric(logger: Any) -> None:
    """Keep a TensorBoardLogger of Lightning 2.6 from logging ``hp_metric`` at step 0 once more."""
    logger._default_hp_metric = False


def hide_events_from(logger: Any, step: int | None) -> None:
    """Let TensorBoard hide what earlier processes have logged from ``step`` on; None hides none."""
    if is_open(logger):
        # Of an earlier ``fit`` in this process.
        logger.experiment.close()
        logger._experiment = None
    logger._kwargs["purge_step"] = step


def append_to_csv(logger: Any, names: list[str]) -> None:
    """Let a CSVLogger add to its file, whose columns are ``names``.

    The writer of Lightning 2.6 deletes the file of an earlier process, and warns of it.
    """

    class AppendingWriter(ExperimentWriter):
        def _check_log_dir_exists(self) -> None:
            """Keep the file."""

    logger._experiment = AppendingWriter(logger.log_dir)
    logger._experiment.metrics_keys = names
    # It would write those of this process only.
    path = Path(logger.log_dir, ExperimentWriter.NAME_HPARAMS_FILE)
    if path.is_file():
        logger._experiment.hparams = load_hparams_from_yaml(path)
