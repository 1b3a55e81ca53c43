"""Trackers besides metrics.csv: Weights & Biases, MLflow, and none.

``configs/logger`` names these functions, and Lightning's class for TensorBoard; rank zero calls
them. A tracker gets the metrics and the run's ``config.yaml``, which is free of secrets, but no
code, no output and no command line.
"""

import logging
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers import Logger, MLFlowLogger, WandbLogger

from samestep.errors import ConfigError
from samestep.ranks import environment

log = logging.getLogger(__name__)

FINISH_TIMEOUT_S = 30  # for W&B to upload what is left when the process ends


def wandb(
    run_dir: str,
    run_id: str,
    project: str,
    entity: str | None,
    group: str | None,
    tags: list[str],
) -> WandbLogger:
    """The Weights & Biases run named ``run_id``; the same name continues the same run.

    Without a key, or without an answer from the server, the run goes on offline, with one warning
    that says why and how to upload it later. ``WANDB_MODE`` is respected without a warning. All
    files of W&B go to ``<run_dir>/wandb``, and what a server that goes away missed stays there.
    """
    import wandb as wb  # slow

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

    def start(mode: Any) -> WandbLogger:
        try:
            run = wb.init(
                project=project, entity=entity, group=group, tags=tags, id=run_id, name=run_id,
                resume="allow", dir=run_dir, config=_config(run_dir), settings=silent, mode=mode,
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
    log.warning("W&B goes on offline: %s. To upload later: wandb sync %s/wandb", why, run_dir)
    return start("offline")


def mlflow(run_dir: str, run_id: str, experiment: str, tracking_uri: str | None) -> MLFlowLogger:
    """A run named ``run_id`` of MLflow's ``experiment``; one that continues adds another.

    Without ``tracking_uri`` it goes to ``MLFLOW_TRACKING_URI``, else to ``<run_dir>/mlflow``.
    """
    from mlflow import environment_variables  # pip install mlflow-skinny

    variable: Any = environment_variables.MLFLOW_TRACKING_URI  # has no types
    uri = tracking_uri or variable.get()
    if uri is None:
        uri = Path(run_dir, "mlflow").absolute().as_uri()
        environment.set_variable("MLFLOW_ALLOW_FILE_STORE", "true")  # no server, no database
    elif uri.startswith("http") and (why := _unreachable(uri)):
        raise ConfigError(f"logger.mlflow.tracking_uri={uri}: {why}")
    logger = MLFlowLogger(experiment, run_name=run_id, tracking_uri=uri)
    config = _config(run_dir)
    # MLflow's file store makes a folder of each slash, and "model/optimizer" beside "model" is both
    # a folder and a file. The chosen values are logged anyway.
    config.pop("choices", None)
    logger.log_hyperparams(config)
    if uri.startswith("file:"):  # logging made it the address of every later run
        variable.unset()
    return logger


class Nothing:
    """Has every attribute and method, takes every argument, and does nothing."""

    def __getattr__(self, name: str) -> "Nothing":
        if name.startswith("__"):
            raise AttributeError(name)  # what copy and pickle ask for
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "Nothing":  # noqa: D102
        return self

    def __getitem__(self, key: Any) -> "Nothing":
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __enter__(self) -> "Nothing":
        return self

    def __exit__(self, *args: object) -> None:
        pass


class NoTracker(Logger):
    """The ``self.logger`` of a module in a run without a tracker, and on ranks other than zero.

    ``self.logger.experiment.add_histogram(...)`` does nothing, and so does any other method of the
    logger and its experiment.
    """

    name = version = ""
    save_dir = root_dir = log_dir = ""  # the run directory
    experiment = Nothing()

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__()
        self.save_dir = self.root_dir = self.log_dir = str(run_dir)

    def __getattr__(self, name: str) -> Nothing:
        value: Nothing = getattr(self.experiment, name)
        return value

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: ``metrics.csv`` has them."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: ``config.yaml`` has them."""


def _config(run_dir: str) -> dict[str, Any]:
    """The configuration as the run directory has it: resolved, and without secrets."""
    config: dict[str, Any] = yaml.safe_load(Path(run_dir, "config.yaml").read_text())
    return config


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
