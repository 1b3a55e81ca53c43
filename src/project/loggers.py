"""Trackers besides metrics.csv: TensorBoard, Weights & Biases, MLflow.

``configs/logger`` names these functions; rank zero calls them. A tracker gets the metrics and the
run's ``config.yaml``, which is free of secrets, but no code, no output and no command line.
"""

import logging
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

from project import environment
from project.config import ConfigError

log = logging.getLogger(__name__)

REACH_TIMEOUT_S = 3  # for a server to answer at all
INIT_TIMEOUT_S = 20  # for W&B to open a run, once its server has answered
FINISH_TIMEOUT_S = 30  # for W&B to upload what is left when the process ends


def tensorboard(run_dir: str) -> TensorBoardLogger:
    """Event files in ``<run_dir>/tensorboard``."""
    return TensorBoardLogger(run_dir, name="tensorboard", version="")


def wandb(
    run_dir: str, run_id: str, project: str, entity: str | None, group: str | None, tags: list[str]
) -> WandbLogger:
    """The Weights & Biases run named ``run_id``; the same name continues the same run.

    Without a key, or without an answer from the server, the run goes on offline, with one warning
    that says why and how to upload it later. ``WANDB_MODE`` is respected without a warning. A
    server that goes away later stops nothing: what it missed stays in ``<run_dir>/wandb``.

    Args:
        run_dir: W&B's files go to its directory ``wandb``.
        run_id: id and name of the W&B run.
        project: W&B project, created when missing.
        entity: user or team that owns the project; None for the key's own.
        group: name under which W&B shows several runs as one; None for none.
        tags: words to find the run by.

    Raises:
        ConfigError: if W&B takes no such project, name or tag.
    """
    import wandb as wb  # slow

    silent = wb.Settings(
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,  # it holds the command line
        x_save_requirements=False,
        init_timeout=INIT_TIMEOUT_S,
        finish_timeout=FINISH_TIMEOUT_S,
    )
    about: dict[str, Any] = {"project": project, "entity": entity, "group": group, "tags": tags}
    about |= {"id": run_id, "name": run_id, "resume": "allow", "dir": run_dir}
    about |= {"config": _config(run_dir), "settings": silent}

    def start(mode: Any) -> WandbLogger:
        try:
            run = wb.init(**about, mode=mode)
        except wb.errors.UsageError as error:  # a name that W&B does not take
            raise ConfigError(str(error)) from error
        run.define_metric("trainer/global_step")
        run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        return WandbLogger(experiment=run)

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # W&B's report on itself
    environment.set_variable("WANDB_DATA_DIR", str(Path(run_dir, "wandb").absolute()))
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
    except ConfigError:
        raise
    except (wb.Error, ValueError) as error:
        why = str(error)
        wb.teardown()
        wb.setup(settings=silent)
    why = why or "there is no key (WANDB_API_KEY, or `wandb login` once)"
    log.warning("W&B goes on offline: %s. To upload later: wandb sync %s/wandb", why, run_dir)
    return start("offline")


def mlflow(run_dir: str, run_id: str, experiment: str, tracking_uri: str | None) -> MLFlowLogger:
    """The MLflow run named ``run_id``; the same name continues the same run.

    Args:
        run_dir: without a server, MLflow's files go to its directory ``mlflow``.
        run_id: name of the MLflow run.
        experiment: MLflow experiment, created when missing.
        tracking_uri: address of the server; None for ``MLFLOW_TRACKING_URI``, else ``run_dir``.

    Raises:
        ConfigError: if the server does not answer.
    """
    try:
        from mlflow import MlflowClient
        from mlflow.environment_variables import MLFLOW_TRACKING_URI
    except ImportError as error:
        raise ConfigError("mlflow is not installed: pip install mlflow-skinny") from error

    uri = tracking_uri or MLFLOW_TRACKING_URI.get()
    local = uri is None
    if local:
        uri = Path(run_dir, "mlflow").absolute().as_uri()
        environment.set_variable("MLFLOW_ALLOW_FILE_STORE", "true")  # needs no server, no database
    elif uri.startswith("http") and (why := _unreachable(uri)):
        raise ConfigError(f"logger.mlflow.tracking_uri={uri}: {why}")
    client = MlflowClient(uri)
    known = client.get_experiment_by_name(experiment)
    name = f"attributes.run_name = '{run_id}'"
    runs = client.search_runs([known.experiment_id], name) if known else []
    number = runs[0].info.run_id if runs else None
    logger = MLFlowLogger(experiment, run_name=run_id, run_id=number, tracking_uri=uri)
    if not runs:
        logger.log_hyperparams(_config(run_dir))
    if local and logger.experiment:  # which made it the address of every later run
        MLFLOW_TRACKING_URI.unset()
    return logger


def _config(run_dir: str) -> dict[str, Any]:
    """The configuration as the run directory has it: resolved, and without secrets."""
    text = (Path(run_dir) / "config.yaml").read_text(encoding="utf-8")
    config: dict[str, Any] = yaml.safe_load(text)
    return config


def _unreachable(url: str) -> str | None:
    """Why the server at ``url`` cannot be used, or None if it answers a request in time."""
    try:
        urllib.request.urlopen(url, timeout=REACH_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        return f"{url} answers {error}" if error.code >= 500 else None
    except (OSError, ValueError) as error:
        return f"{url} does not answer: {getattr(error, 'reason', error)}"
    return None
