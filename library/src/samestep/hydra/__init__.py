"""The configuration: composed, checked, rejected with one clear message, and made into objects.

Invalid arguments end within a second, with exit code 2 and one message, and leave nothing behind.

Read in this order. Without torch: ``project`` (where configs/ is), ``overrides`` (what was typed),
``compose`` (both become one configuration), ``schema`` (its keys and types are compared with the
files), ``rule`` and ``rules`` (ranges, choices), ``option_keys`` (words for messages),
``nodes``, ``suggestions`` and ``origins`` (helpers of these), and ``multirun`` (grids). With torch:
``front_end`` (name of the run, and what Hydra adds to it), ``build`` (Trainer, model and data),
``targets`` (what a saved run may call), ``saved_run`` (model and data of a run, rebuilt and
evaluated), and ``program`` with ``main`` (a program that trains, from its arguments to its exit
code).
"""

from typing import Any

from omegaconf import OmegaConf


def elastic_ranks(*, _root_: Any) -> int | None:
    """The most ranks of a run whose nodes come and go; None for any other, and with FSDP."""
    nodes = OmegaConf.select(_root_, "cluster.max_nodes")
    devices = _root_.trainer.devices
    if not isinstance(nodes, int) or not isinstance(devices, int):
        return None
    return None if _root_.trainer.strategy == "fsdp" else nodes * devices


OmegaConf.register_new_resolver("elastic_ranks", elastic_ranks, replace=True)
