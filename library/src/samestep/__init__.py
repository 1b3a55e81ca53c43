"""Samestep: the same steps on any number of ranks, before and after any interruption.

Read ``trainer`` first: what happens from ``fit`` to the end. Then ``loops``: what happens between
two steps. Then ``lightning_names``, ``errors``, ``metrics``, ``config_keys``, ``option_names``,
``run_spec``, ``ranks``, ``command_line``, ``data``, ``run``, ``node``, ``loggers``, ``callbacks``,
``arguments`` and ``fit_checks``, which need no Hydra; then ``hydra``, which makes the arguments of
the Trainer from configuration files, ``doctor``, ``report``, ``launch``, ``sweep``, ``loading``
(model and data of a run), ``evaluate``, ``predict``, ``export`` with ``model_files`` and
``model_card``, ``script`` and ``cli``. Each folder opens with what it promises.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samestep import lightning_names

if TYPE_CHECKING:
    from samestep.data.arrow import ArrowRows
    from samestep.data.lance import LanceRows
    from samestep.data.loader import BatchLoader
    from samestep.data.order import Blocks
    from samestep.data.sampler import Slice
    from samestep.errors import ConfigError, RunError
    from samestep.loading import load_run
    from samestep.metrics import EpochMean
    from samestep.ranks.process_group import gather
    from samestep.ranks.secrets import redact
    from samestep.script import run_script
    from samestep.trainer import Trainer

MODULES = {
    "ArrowRows": "samestep.data.arrow",
    "BatchLoader": "samestep.data.loader",
    "Blocks": "samestep.data.order",
    "ConfigError": "samestep.errors",
    "EpochMean": "samestep.metrics",
    "LanceRows": "samestep.data.lance",
    "RunError": "samestep.errors",
    "Slice": "samestep.data.sampler",
    "Trainer": "samestep.trainer",
    "gather": "samestep.ranks.process_group",
    "load_run": "samestep.loading",
    "redact": "samestep.ranks.secrets",
    "run_script": "samestep.script",
}
"""Where each public name is defined."""

__all__ = [
    "ArrowRows", "BatchLoader", "Blocks", "ConfigError", "EpochMean", "LanceRows", "RunError",
    "Slice", "Trainer", "gather", "load_run", "redact", "run_script",
]  # fmt: skip

lightning_names.install()


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: help and errors need no torch."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(MODULES[name]), name)
