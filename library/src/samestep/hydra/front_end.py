"""What Hydra adds to a run of ``samestep.Trainer``: its name, its records, and what it prints.

Imports no torch: help and errors answer before.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from samestep.errors import ConfigError
from samestep.hydra.nodes import with_text_paths
from samestep.hydra.option_keys import WORDS, keys_of
from samestep.hydra.origins import find_overridden
from samestep.hydra.rules import NAME
from samestep.ranks import environment
from samestep.ranks.secrets import redact_values
from samestep.report import page, summary
from samestep.run_spec import RunSpec, no_report


def topology_of(cfg: DictConfig) -> tuple[str, int | str, int]:
    """Accelerator, devices and nodes, as the Trainer's arguments."""
    return cfg.trainer.accelerator, cfg.trainer.devices, cfg.trainer.num_nodes


def name_run(cfg: DictConfig) -> str:
    """The name the run was given, or a new one such as ``mnist-mlp-3f2a1b``.

    The first of these counts: ``run_id`` of the configuration, ``$RUN_ID``, torchrun's run id, and
    a new name from the chosen data, the chosen model and six random hexadecimal characters.
    """
    # Without data the choice is empty.
    chosen = filter(None, [cfg.choices.data, cfg.choices.model])
    name = cfg.run_id or environment.run_id() or environment.new_run_id(*chosen)
    if not NAME.holds(name):
        raise ConfigError(
            f"RUN_ID={name}: must be at most 63 of A-Z a-z 0-9 . _ -, the first a letter or digit"
        )
    return str(name)


def front_end_of(
    cfg: DictConfig,
    overrides: Sequence[str],
    callbacks: Mapping[str, Any],
    make_loggers: Callable[[], Sequence[Any]],
) -> RunSpec:
    """What the checked ``cfg`` adds to a run, beside the arguments of its Trainer.

    Args:
        cfg: the configuration; its ``run_id`` is set.
        overrides: what made it from the defaults, for the records.
        callbacks: those of ``cfg.callbacks``, by their keys.
        make_loggers: makes the loggers of ``cfg.logger``.
    """
    # A project may have nodes of its own dataclasses, with enums and paths in them.
    resolved = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    config = redact_values(with_text_paths(resolved))
    return RunSpec(
        run_id=str(cfg.run_id),
        run_dir=Path(cfg.run_dir),
        config=config,
        command=("train.py", *overrides),
        overridden=find_overridden(cfg.choices, overrides),
        option_names=keys_of(callbacks),
        option_words=WORDS,
        another_run="another name (RUN_ID=...)",
        is_elastic="max_nodes" in config["cluster"],
        ends_with_test=True,
        resume_command=lambda spec: summary.resume_command(config, spec.run_dir, None),
        make_loggers=make_loggers,
        report=page.write_or_warn if cfg.report else no_report,
        summarize=summary.summarize,
    )
