"""Trackers besides metrics.csv: TensorBoard, Weights & Biases, MLflow.

``configs/logger`` names these functions; rank zero calls them. A tracker gets the metrics and the
run's ``config.yaml``, which is free of secrets, but no code, no output and no command line.
"""

import importlib.util
import logging
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

from project.config import ConfigError

log = logging.getLogger(__name__)

REACH_TIMEOUT_S = 3  # for a server to answer at all
INIT_TIMEOUT_S = 20  # for W&B to open a run, once its server has answered
FINISH_TIMEOUT_S = 60  # for W&B to upload what is left when the process ends


def tensorboard(run_dir: str) -> TensorBoardLogger:
    """Event files in ``<run_dir>/tensorboard``, for ``tensorboard --logdir runs``."""
    _require("tensorboard")
    return TensorBoardLogger(run_dir, name="tensorboard", version="", default_hp_metric=False)


def wandb(
    run_dir: str, run_id: str, project: str, entity: str | None, group: str | None, tags: list[str]
) -> WandbLogger:
    """The Weights & Biases run named ``run_id``; the same name continues the same run.

    Without a key, or without an answer from the server, the run goes on offline, with one warning
    that says why and how to upload it later. ``WANDB_MODE`` is respected without a warning. A
    server that goes away later stops nothing: what it missed stays on the disk.

    Args:
        run_dir: its ``wandb`` directory holds W&B's files.
        run_id: id and name of the W&B run.
        project: W&B project.
        entity: user or team that owns the project; None for the key's own.
        group: name under which W&B shows several runs as one; None for none.
        tags: words to find the run by.
    """
    _require("wandb")
    import wandb as wb

    wb.setup(settings=wb.Settings(silent=True))
    arguments: dict[str, Any] = {
        "project": project,
        "entity": entity,
        "group": group,
        "tags": tags,
        "id": run_id,
        "name": run_id,
        "dir": run_dir,
        "config": _config(run_dir),
        "settings": wb.Settings(
            silent=True,
            console="off",
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,  # it holds the command line
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
        ),
    }
    settings = wb.setup().settings
    if settings.mode == "online":
        if (why := _unreachable(settings.base_url)) is None:
            try:
                if wb.login(prompt=False, verify=False):
                    run = wb.init(**arguments, resume="allow")
                    print(f"W&B: {run.url}")
                    return _wandb_logger(run)
                why = "there is no key: set WANDB_API_KEY, or run `wandb login`"
            except (wb.Error, ValueError) as error:
                why = str(error)
        log.warning(
            "W&B goes on offline: %s. Upload the run later: wandb sync %s/wandb", why, run_dir
        )
        arguments["mode"] = "offline"
    return _wandb_logger(wb.init(**arguments))


def _wandb_logger(run: Any) -> WandbLogger:
    """Lightning's logger for ``run``, with optimizer steps as the x-axis of every plot."""
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return WandbLogger(experiment=run)


def mlflow(run_dir: str, run_id: str, experiment: str, tracking_uri: str | None) -> MLFlowLogger:
    """The MLflow run named ``run_id``; the same name continues the same run.

    Args:
        run_dir: its ``mlflow`` directory holds the files of a run without a server.
        run_id: name of the MLflow run.
        experiment: MLflow experiment.
        tracking_uri: address of the server; None for ``MLFLOW_TRACKING_URI``, else ``run_dir``.

    Raises:
        ConfigError: if the server does not answer.
    """
    _require("mlflow", install="mlflow-skinny")
    from mlflow.environment_variables import MLFLOW_ALLOW_FILE_STORE
    from mlflow.tracking import MlflowClient, get_tracking_uri, is_tracking_uri_set

    if tracking_uri is None and is_tracking_uri_set():
        tracking_uri = get_tracking_uri()
    if tracking_uri is None:
        tracking_uri = (Path(run_dir) / "mlflow").absolute().as_uri()
        MLFLOW_ALLOW_FILE_STORE.set(True)  # files need no server and no database
    elif tracking_uri.startswith("http") and (why := _unreachable(tracking_uri)):
        raise ConfigError(f"logger.mlflow.tracking_uri={tracking_uri}: {why}")
    client = MlflowClient(tracking_uri)
    known = client.get_experiment_by_name(experiment)
    runs = known and client.search_runs(
        [known.experiment_id], f"attributes.run_name = '{run_id}'", max_results=1
    )
    logger = MLFlowLogger(
        experiment, run_id, tracking_uri, run_id=runs[0].info.run_id if runs else None
    )
    if runs:
        client.update_run(logger.run_id, status="RUNNING")
    else:
        logger.log_hyperparams(_config(run_dir))
    return logger


def _require(package: str, install: str | None = None) -> None:
    """Refuse a logger whose package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{package} is not installed: pip install {install or package}")


def _config(run_dir: str) -> dict[str, Any]:
    """The configuration as the run directory has it: resolved, and without secrets."""
    path = Path(run_dir) / "config.yaml"
    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
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
