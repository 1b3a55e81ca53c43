"""Trackers besides metrics.csv: Weights & Biases, MLflow and TensorBoard.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

from samestep.errors import ConfigError
from samestep.mlflow_runs import KnownRun, compare_parameters, known_run, read_metrics, tag_changed
from samestep.ranks import environment
from samestep.run import record
from samestep.run.changes import read_config
from samestep.run_spec import leaves
from samestep.tracker import ResumedTracker

log = logging.getLogger(__name__)

EMPTY_BYTES = 7  # of a file of W&B: its header
IDENTITY = "samestep.run"  # the tag by which MLflow finds a run again
START_TIMEOUT_S = 20  # for W&B to start a run, once the server has answered
FINISH_TIMEOUT_S = 30  # for W&B to upload what is left when the process ends
ANSWER_TIMEOUT_S = 3  # for a server to answer at all
MAX_PARAMETER = 250  # characters that MLflow takes


# -- Weights & Biases ------------------------------------------------------------------------------


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
    files of W&B go to ``<run_dir>/wandb``, also the metrics that a lost server has not received.

    Raises:
        ConfigError: if W&B is not installed, or rejects a name.
    """
    require("wandb", "wandb")
    import wandb  # slow

    remove_empty_offline_runs(run_dir)
    silent = wandb.Settings(
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,  # it holds the command line
        x_save_requirements=False,
        init_timeout=START_TIMEOUT_S,
        finish_timeout=FINISH_TIMEOUT_S,
    )
    options = {
        "project": project,
        "entity": entity,
        "group": group,
        "tags": tags,
        "id": run_id,
        "name": run_id,
        "dir": run_dir,
        "config": read_config(Path(run_dir)),
        "settings": silent,
    }
    # W&B's report on itself.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    set_wandb_folders(Path(run_dir, "wandb").absolute())
    # The run before this one, in a sweep.
    wandb.finish()
    wandb.teardown()
    settings = wandb.setup(settings=silent).settings
    if settings.mode != "online":
        return start_wandb(settings.mode, options)
    why = why_unreachable(settings.base_url)
    try:
        # W&B itself would wait much longer for a server that does not answer.
        if not why and wandb.login(prompt=False, verify=False):
            logger = start_wandb("online", options)
            print(f"W&B: {logger.experiment.url}", flush=True)
            return logger
    except (wandb.Error, ValueError) as error:
        why = str(error)
        # Nothing of the failed attempt may stay in the service of W&B.
        wandb.teardown()
        wandb.setup(settings=silent)
    why = why or "there is no key (WANDB_API_KEY, or `wandb login` once)"
    later = f"To upload later: wandb sync {run_dir}/wandb/offline-run-*"
    log.warning("W&B continues offline: %s. %s", why, later)
    return start_wandb("offline", options)


def start_wandb(mode: Any, options: Mapping[str, Any]) -> WandbLogger:
    """Start or continue a run.

    Raises:
        ConfigError: if W&B rejects a name.
    """
    import wandb

    try:
        run = wandb.init(mode=mode, resume="allow", **options)
    except wandb.errors.UsageError as error:
        raise ConfigError(str(error)) from error
    # Charts over steps, not over calls of ``log``: a run that resumes repeats some of them.
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return WandbLogger(experiment=run, save_dir=options["dir"])


def remove_empty_offline_runs(run_dir: str) -> None:
    """Remove the files of processes that were killed at once: ``wandb sync`` would stop there."""
    for path in Path(run_dir, "wandb").glob("offline-run-*/*.wandb"):
        if path.stat().st_size <= EMPTY_BYTES:
            shutil.rmtree(path.parent)


def set_wandb_folders(folder: Path) -> None:
    """Let W&B keep all its files in ``folder``."""
    environment.set_variable("WANDB_DATA_DIR", str(folder))
    home = environment.variable("HOME")
    has_home = home is not None and os.access(home, os.W_OK)
    # Without a home to write its own log into, W&B prints the log.
    if environment.variable("WANDB_CACHE_DIR") is None and not has_home:
        environment.set_variable("WANDB_CACHE_DIR", str(folder / "cache"))


# -- MLflow ----------------------------------------------------------------------------------------


class MLflow(MLFlowLogger):
    """A logger of MLflow that leaves out what MLflow has: a step that is trained again."""

    known: frozenset[tuple[str, int | None, float]] = frozenset()  # names, steps and values

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log what MLflow does not have."""
        new = {}
        for name, value in metrics.items():
            if (name, step, value) not in self.known:
                new[name] = value
        super().log_metrics(new, step)

    def finalize(self, status: str = "success") -> None:
        """Tell MLflow how the run has ended; ``KILLED`` is a run that was stopped."""
        is_stopped = isinstance(sys.exc_info()[1], SystemExit)
        super().finalize("KILLED" if is_stopped else status)


def mlflow_logger(run_dir: str, run_id: str, experiment: str, tracking_uri: str | None) -> MLflow:
    """The run named ``run_id`` of MLflow's ``experiment``; a run that resumes is the same one.

    Without ``tracking_uri`` it goes to ``MLFLOW_TRACKING_URI``, else to ``<run_dir>/mlflow``.
    MLflow keeps the first value of a parameter; a value that has changed since becomes a tag.

    Raises:
        ConfigError: if MLflow is not installed, or its server does not answer.
    """
    require("mlflow", "mlflow-skinny")
    from mlflow import MlflowClient, environment_variables

    variable: Any = environment_variables.MLFLOW_TRACKING_URI  # has no types
    uri = tracking_uri or variable.get()
    if uri is None:
        uri = Path(run_dir, "mlflow").absolute().as_uri()
        environment.set_variable("MLFLOW_ALLOW_FILE_STORE", "true")  # no server, no database
    check_mlflow_server(uri)
    client = MlflowClient(uri)
    saved = record.read(Path(run_dir))
    # The time of the first start: a run that was deleted and started over is another one.
    identity = " ".join([run_id, *(str(start.get("started")) for start in saved.starts[:1])])
    found = find_mlflow_run(client, experiment, identity)
    params = config_parameters(run_dir)
    new, changed = compare_parameters(params, found.params)
    # No checkpoint was saved, so another configuration may use the name.
    if changed and saved.step is None:
        client.set_terminated(found.number, "KILLED")
        found, new, changed = KnownRun(), params, {}
    logger = MLflow(experiment, run_id, uri, tags={IDENTITY: identity}, run_id=found.number)
    number = str(logger.run_id)
    logger.known = read_metrics(client, found)
    logger.log_hyperparams(new)
    tag_changed(client, number, changed)
    client.update_run(number, "RUNNING")
    # Logging has made the folder of this run the address of every later run in this process.
    if uri.startswith("file:"):
        variable.unset()
    return logger


def check_mlflow_server(uri: str) -> None:
    """Raise a ConfigError if a server does not answer: MLflow itself would retry for minutes."""
    if not uri.startswith("http"):
        return
    why = why_unreachable(uri)
    if why:
        raise ConfigError(f"MLflow's tracking_uri={uri}: {why}")


def find_mlflow_run(client: Any, experiment: str, identity: str) -> KnownRun:
    """The run with this identity in MLflow."""
    place = client.get_experiment_by_name(experiment)
    if place is None:
        return KnownRun()
    mine = f"tags.`{IDENTITY}` = '{identity}'"
    runs = client.search_runs([place.experiment_id], mine, max_results=1)
    if not runs:
        return KnownRun()
    return known_run(runs[0])


# -- TensorBoard -----------------------------------------------------------------------------------


class TensorBoard(TensorBoardLogger, ResumedTracker):
    """Event files in ``<run_dir>/tensorboard``; a run that resumes adds to them."""

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
        # Indented text is code in Markdown.
        self.experiment.add_text("config.yaml", textwrap.indent(text, "    "), step)
        # The first summary would say which metrics there are. TensorBoard finds all by itself.
        parameters = config_parameters(self.save_dir)
        for summary in hparams(parameters, {})[1:]:  # type: ignore[no-untyped-call]
            file_writer.add_summary(summary)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log at once, so that a process that is killed loses nothing."""
        super().log_metrics(metrics, step)
        self.experiment.flush()


# -- Helpers ---------------------------------------------------------------------------------------


def config_parameters(run_dir: str) -> dict[str, str]:
    """The configuration as flat texts, such as ``{"model/lr": "0.1"}``."""
    config = read_config(Path(run_dir))
    # MLflow's file store makes a folder of each slash, and "model/optimizer" beside "model" is both
    # a folder and a file. The chosen values are logged anyway.
    config.pop("choices", None)
    parameters = {}
    for key, value in leaves(config).items():
        parameters[key.replace(".", "/")] = str(value)[:MAX_PARAMETER]
    return parameters


def require(module: str, package: str) -> None:
    """Raise a ConfigError with the remedy if a package is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"logger: a package is missing: pip install {package}")


def why_unreachable(url: str) -> str | None:
    """Why the server at ``url`` cannot be used, or None if it answers a request in time."""
    # urllib does not accept user and password in a URL, and a message must not show them.
    url = re.sub("//[^/]*@", "//", url)
    try:
        urllib.request.urlopen(url, timeout=ANSWER_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        # An error code is an answer.
        return None
    except (OSError, ValueError) as error:
        return f"{url} does not answer: {getattr(error, 'reason', error)}"
    return None
