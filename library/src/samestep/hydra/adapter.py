"""From a composed configuration to the facts that the rooms below it read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from samestep.hydra.compose import find_overridden
from samestep.hydra.rules import load_project_rules
from samestep.ranks.secrets import redact_values
from samestep.spec import RunSpec

LIGHTNINGS_PATIENCE = 3  # of EarlyStopping, where the configuration has none


def topology_of(cfg: DictConfig) -> tuple[str, int | str, int]:
    """Accelerator, devices and nodes, as the Trainer's arguments."""
    return cfg.trainer.accelerator, cfg.trainer.devices, cfg.trainer.num_nodes


def spec_of(cfg: DictConfig, overrides: Sequence[str] = ()) -> RunSpec:
    """The run that ``cfg`` describes; its ``run_id`` is set.

    Args:
        cfg: the checked configuration.
        overrides: what made it from the defaults, for the records.
    """
    config = redact_values(OmegaConf.to_container(cfg, resolve=True))
    trainer, cluster = cfg.trainer, config["cluster"]
    strategy = config["trainer"]["strategy"]
    return RunSpec(
        run_id=str(cfg.run_id),
        run_dir=Path(cfg.run_dir),
        seed=cfg.seed,
        config=config,
        accelerator=trainer.accelerator,
        devices=trainer.devices,
        num_nodes=None if "max_nodes" in cluster else trainer.num_nodes,
        strategy=strategy if isinstance(strategy, str) else strategy["_target_"],
        sync_batchnorm=trainer.sync_batchnorm,
        deterministic=trainer.deterministic is True,
        timeout_s=cluster["timeout_s"],
        shares=cluster["shares"],
        allow_changes=list(cfg.allow_changes),
        notes=cfg.notes or "",
        tags=list(cfg.tags),
        may_change=load_project_rules(cfg.rules).may_change,
        limits={k: v for k, v in config["trainer"].items() if k.startswith("max_")}
        | find_patience(config),
        saves_nothing=bool(trainer.fast_dev_run),
        overridden=find_overridden(cfg.choices or {}, list(overrides)),
        another_run="another name (RUN_ID=...)",
    )


def find_patience(config: Mapping[str, Any]) -> dict[str, int]:
    """The patience of each early stopping in ``config``, by its key."""
    return {
        f"callbacks.{name}.patience": node.get("patience", LIGHTNINGS_PATIENCE)
        for name, node in (config.get("callbacks") or {}).items()
        if str(node.get("_target_")).endswith("EarlyStopping")
    }
