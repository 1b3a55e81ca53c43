"""Trackers besides metrics.csv: Weights & Biases, MLflow, TensorBoard, and none.

``configs/logger`` names what is here, and rank zero calls it. A tracker gets the
metrics and the run's ``config.yaml``, which is free of secrets, but no code, no output and no
command line.
"""

import importlib.util
import logging
import os
import re
import shutil
import sys
import textwrap
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from samestep.errors import ConfigError
from samestep.ranks import environment
from samestep.run import record
from samestep.run.changes import read_config
from samestep.run_spec import leaves

log = logging.getLogger(__name__)

EMPTY_BYTES = 7  # of a file of W&B: its header
IDENTITY = "samestep.run"  # the tag by which MLflow finds a run again
FINISH_TIMEOUT_S = 30  # for W&B to upload what is left when the process ends


def wandb_logger(
    run_dir: str,
    run_id: str,
    project: str,
    entity: str | None,
    group: str | None,
    tags: list[str],
) -> WandbLogger:
    """The Weights & Biases run named ``run_id``; the same name continues the same run.

    Without a key, or without an answer from the server, the run continues offline, with one warning
    that says why and how to upload it later. ``WANDB_MODE`` is respected without a warning. All
    files of W&B go to ``<run_dir>/wandb``, and what a server that goes away missed stays there.
    """
    require("wandb", "wandb")
    import wandb as wb  # slow

    # A process that was killed at once leaves an empty file, with which `wandb sync` would stop.
    for path in Path(run_dir, "wandb").glob("offline-run-*/*.wandb"):
        if path.stat().st_size <= EMPTY_BYTES:
            shutil.rmtree(path.parent)

    silent = wb.Settings(
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,  # it holds the command line
        x_save_requirements=False,
        init_timeout=20,  # seconds, once the server has answered
        finish_timeout=FINISH_TIMEOUT_S,
    )

    config = read_config(Path(run_dir))

    def start(mode: Any) -> WandbLogger:
        try:
            run = wb.init(
                project=project, entity=entity, group=group, tags=tags, id=run_id, name=run_id,
                resume="allow", dir=run_dir, config=config, settings=silent, mode=mode,
            )  # fmt: skip
        except wb.errors.UsageError as error:  # a name that W&B does not take
            raise ConfigError(str(error)) from error
        run.define_metric("trainer/global_step")
        run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        return WandbLogger(experiment=run, save_dir=run_dir)

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # W&B's report on itself
    environment.set_variable("WANDB_DATA_DIR", str(Path(run_dir, "wandb").absolute()))
    home = environment.variable("HOME")
    if environment.variable("WANDB_CACHE_DIR") is None and not (home and os.access(home, os.W_OK)):
        # Otherwise W&B prints its own log, because it cannot write it into the home directory.
        environment.set_variable("WANDB_CACHE_DIR", str(Path(run_dir, "wandb", "cache").absolute()))
    wb.finish()  # the run before this one, in a sweep
    wb.teardown()
    settings = wb.setup(settings=silent).settings
    if settings.mode != "online":
        return start(settings.mode)
    why = _unreachable(settings.base_url)
    try:
        if not why and wb.login(prompt=False, verify=False):
            logger = start("online")
            print(f"W&B: {logger.experiment.url}", flush=True)
            return logger
    except (wb.Error, ValueError) as error:
        why = str(error)
        wb.teardown()
        wb.setup(settings=silent)
    why = why or "there is no key (WANDB_API_KEY, or `wandb login` once)"
    later = f"To upload later: wandb sync {run_dir}/wandb/offline-run-*"
    log.warning("W&B continues offline: %s. %s", why, later)
    return start("offline")


class MLflow(MLFlowLogger):
    """A logger of MLflow that leaves out what MLflow has: a step that is trained again."""

    known: frozenset[tuple[str, int | None, float]] = frozenset()  # names, steps and values

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log what MLflow does not have."""
        new = {k: v for k, v in metrics.items() if (k, step, v) not in self.known}
        super().log_metrics(new, step)

    def finalize(self, status: str = "success") -> None:
        """Tell MLflow how the run has ended; ``KILLED`` is one that was stopped."""
        is_stopped = isinstance(sys.exc_info()[1], SystemExit)
        super().finalize("KILLED" if is_stopped else status)


def mlflow_logger(run_dir: str, run_id: str, experiment: str, tracking_uri: str | None) -> MLflow:
    """The run named ``run_id`` of MLflow's ``experiment``; a run that continues is the same one.

    Without ``tracking_uri`` it goes to ``MLFLOW_TRACKING_URI``, else to ``<run_dir>/mlflow``.
    MLflow keeps the first value of a parameter; one that has changed since becomes a tag.
    """
    require("mlflow", "mlflow-skinny")
    from mlflow import MlflowClient, environment_variables

    variable: Any = environment_variables.MLFLOW_TRACKING_URI  # has no types
    uri = tracking_uri or variable.get()
    if uri is None:
        uri = Path(run_dir, "mlflow").absolute().as_uri()
        environment.set_variable("MLFLOW_ALLOW_FILE_STORE", "true")  # no server, no database
    elif uri.startswith("http") and (why := _unreachable(uri)):
        raise ConfigError(f"logger.mlflow.tracking_uri={uri}: {why}")
    client, known, found = MlflowClient(uri), record.read(Path(run_dir)), list[Any]()
    # A run that was deleted and begun again is another one.
    identity = " ".join([run_id, *(str(s.get("started")) for s in known.starts[:1])])
    if place := client.get_experiment_by_name(experiment):
        mine = f"tags.`{IDENTITY}` = '{identity}'"
        found = client.search_runs([place.experiment_id], mine, max_results=1)
    params = _parameters(run_dir)
    before = found[0].data.params if found else {}
    changed = {k: v for k, v in params.items() if before.get(k, v) != v}
    if changed and known.step is None:  # nothing was saved, so the name was free
        client.set_terminated(found[0].info.run_id, "KILLED")
        found, before, changed = [], {}, {}
    number = found[0].info.run_id if found else None
    logger = MLflow(experiment, run_id, uri, tags={IDENTITY: identity}, run_id=number)
    number = str(logger.run_id)
    logger.known = frozenset(
        (metric.key, metric.step, metric.value)
        for key in (found[0].data.metrics if found else ())
        for metric in client.get_metric_history(number, key)
    )
    logger.log_hyperparams({k: v for k, v in params.items() if k not in before})
    for key, value in changed.items():
        client.set_tag(number, f"changed/{key}", value)
    client.update_run(number, "RUNNING")
    if uri.startswith("file:"):  # logging made it the address of every later run
        variable.unset()
    return logger


class TensorBoard(TensorBoardLogger):
    """Event files in ``<run_dir>/tensorboard``; a run that continues adds to them."""

    def __init__(self, run_dir: str) -> None:
        require("tensorboard", "tensorboard")
        super().__init__(run_dir, name="tensorboard", version="")

    def begin(self, step: int) -> None:
        """Hide what a killed process has logged from ``step`` on; write down the configuration."""
        from tensorboard.compat.proto.event_pb2 import (  # type: ignore[import-untyped]
            Event,
            SessionLog,
        )
        from torch.utils.tensorboard.summary import hparams

        file_writer = self.experiment.file_writer
        assert file_writer
        restart = SessionLog(status=SessionLog.START)
        file_writer.add_event(Event(step=step, session_log=restart))
        text = Path(self.save_dir, "config.yaml").read_text()
        self.experiment.add_text("config.yaml", textwrap.indent(text, "    "), step)
        # The first summary would say which metrics there are. TensorBoard finds all by itself.
        for summary in hparams(_parameters(self.save_dir), {})[1:]:  # type: ignore[no-untyped-call]
            file_writer.add_summary(summary)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log at once, so that a process that is killed loses nothing."""
        super().log_metrics(metrics, step)
        self.experiment.flush()


class NullObject:
    """Has every attribute and method, takes every argument, and does nothing."""

    def __getattr__(self, name: str) -> "NullObject":
        if name.startswith("__"):
            raise AttributeError(name)  # what copy and pickle ask for
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "NullObject":  # noqa: D102
        return self

    __getitem__ = __enter__ = __call__

    def __setitem__(self, *args: object) -> None:
        pass

    __exit__ = __setitem__

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0


class NullLogger(Logger):
    """The ``self.logger`` of a module in a run without a tracker, and on ranks other than zero.

    ``self.logger.experiment.add_histogram(...)`` does nothing, and so does any other method of the
    logger and its experiment.
    """

    name = version = ""
    save_dir = root_dir = log_dir = ""  # the run directory
    experiment = NullObject()

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__()
        self.save_dir = self.root_dir = self.log_dir = str(run_dir)

    def __getattr__(self, name: str) -> NullObject:
        value: NullObject = getattr(self.experiment, name)
        return value

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: ``metrics.csv`` has them."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: ``config.yaml`` has them."""


def _parameters(run_dir: str) -> dict[str, str]:
    """The configuration as flat texts, such as ``{"model/lr": "0.1"}``."""
    config = read_config(Path(run_dir))
    # MLflow's file store makes a folder of each slash, and "model/optimizer" beside "model" is both
    # a folder and a file. The chosen values are logged anyway.
    config.pop("choices", None)
    # MLflow takes no more than 250 characters.
    return {k.replace(".", "/"): str(v)[:250] for k, v in leaves(config).items()}


def require(module: str, package: str) -> None:
    """Raise a ConfigError with the remedy if a package is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"logger: a package is missing: pip install {package}")


def _unreachable(url: str) -> str | None:
    """Why the server at ``url`` cannot be used, or None if it answers a request in time."""
    # A name and a password before the host are no part of an address for urllib, nor for a message.
    url = re.sub("//[^/]*@", "//", url)
    try:
        urllib.request.urlopen(url, timeout=3).close()
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        return f"{url} does not answer: {getattr(error, 'reason', error)}"
    return None
