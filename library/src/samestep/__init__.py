"""Samestep: the same steps on any number of ranks, before and after any interruption.

Read ``trainer`` first: what happens from ``fit`` to the end. Then ``lightning_names``, ``errors``,
``metrics``, ``config_keys``, ``run_spec``, ``ranks``, ``command_line``, ``data``, ``run``,
``node``, ``callbacks`` and ``ending``, which need no Hydra; then ``hydra``, which makes the same
run from configuration files, ``doctor``, ``report``, ``launch``, ``sweep`` and ``cli``. Each folder
opens with what it promises.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samestep import lightning_names

if TYPE_CHECKING:
    from samestep.data.loader import BatchLoader
    from samestep.errors import ConfigError, RunError
    from samestep.metrics import EpochMean
    from samestep.trainer import Trainer

__all__ = ["BatchLoader", "ConfigError", "EpochMean", "RunError", "Trainer"]

lightning_names.install()


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: help and errors need no torch."""
    places = {
        "BatchLoader": "samestep.data.loader",
        "ConfigError": "samestep.errors",
        "RunError": "samestep.errors",
        "EpochMean": "samestep.metrics",
        "Trainer": "samestep.trainer",
    }
    if name not in places:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(places[name]), name)
