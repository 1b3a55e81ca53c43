"""Samestep: the same steps on any number of ranks, before and after any interruption.

Read ``trainer`` first: what happens from ``fit`` to the end. Then ``loops``: what happens between
two steps. Then ``heap``: what the objects of a program hold. Then ``lightning_names``, ``errors``,
``versions``, ``metrics``, ``config_keys``, ``option_names``, ``run_spec``, ``ranks``, ``losses``,
``command_line``, ``download``, ``data``, ``run``, ``node``, ``tracker``, ``mlflow_runs``,
``loggers``, ``plugin``, ``callbacks``, ``plugins``, ``arguments``, ``fit_checks``,
``lightning_patch`` and ``verify``, which need no Hydra; then ``hydra``, which makes the arguments
of the Trainer from configuration files, ``grid``, ``doctor``, ``report``, ``launch``, ``sweep``,
``loading`` (model and data of a run), ``evaluate``, ``predict``, ``export`` with ``model_files``
and ``model_card``, ``script``, ``completion`` and ``cli``. Each folder opens with what it promises.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# First of all: on Windows most modules here would fail at an import of their own, each at another.
if find_spec("fcntl") is None:
    raise ImportError(
        f"samestep: sys.platform={sys.platform}: is not supported, because a run needs the file "
        "locks and signals of POSIX; use Linux or macOS, and on Windows WSL2"
    )

from samestep import lightning_names, versions

MODULES = {
    "ArrowRows": "samestep.data.arrow",
    "BatchLoader": "samestep.data.loader",
    "Blocks": "samestep.data.order",
    "ConfigError": "samestep.errors",
    "EpochMean": "samestep.metrics",
    "LanceRows": "samestep.data.lance",
    "Parser": "samestep.command_line",
    "Plugin": "samestep.plugin",
    "RunError": "samestep.errors",
    "Slice": "samestep.data.sampler",
    "Trainer": "samestep.trainer",
    "build_datamodule": "samestep.hydra.build",
    "build_run": "samestep.hydra.build",
    "compose_run": "samestep.hydra.program",
    "download_once": "samestep.download",
    "gather": "samestep.ranks.process_group",
    "gather_batch": "samestep.losses",
    "load_run": "samestep.loading",
    "mean": "samestep.losses",
    "patch_lightning": "samestep.lightning_patch",
    "redact": "samestep.ranks.secrets",
    "register": "samestep.heap.kinds",
    "run_program": "samestep.hydra.program",
    "run_script": "samestep.script",
    "train_in_process": "samestep.hydra.main",
}
"""Where each public name is defined; ``__init__.pyi`` says it to type checkers."""

__all__ = [*MODULES]

lightning_names.install()


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: help and errors need no torch."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(MODULES[name])
    except ImportError as error:
        why = versions.explain_import(error)
        if why is None:
            raise
        raise ImportError(f"samestep: {why}") from error
    return getattr(module, name)
