"""From a composed configuration to the facts that the rooms below it read, and to its name."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from samestep.errors import ConfigError
from samestep.hydra.origins import find_overridden
from samestep.hydra.project_rules import load_project_rules
from samestep.hydra.rules import NAME
from samestep.ranks import environment
from samestep.ranks.secrets import redact_values
from samestep.run_spec import RunSpec

LIGHTNINGS_PATIENCE = 3  # of EarlyStopping, where the configuration has none


def topology_of(cfg: DictConfig) -> tuple[str, int | str, int]:
    """Accelerator, devices and nodes, as the Trainer's arguments."""
    return cfg.trainer.accelerator, cfg.trainer.devices, cfg.trainer.num_nodes


def name_run(cfg: DictConfig) -> str:
    """The name the run was given, or a new one such as ``mnist-mlp-3f2a1b``.

    The first of these counts: ``run_id`` of the configuration, ``$RUN_ID``, torchrun's run id, and
    a new name from the chosen data, the chosen model and six random hexadecimal characters.
    """
    chosen = [str(name) for name in (cfg.choices.data, cfg.choices.model) if name]
    name = cfg.run_id or environment.run_id() or environment.new_run_id(*chosen)
    if not NAME.holds(name):
        raise ConfigError(
            f"RUN_ID={name}: must be at most 63 of A-Z a-z 0-9 . _ -, the first a letter or digit"
        )
    return str(name)


def spec_of(cfg: DictConfig, overrides: Sequence[str] = ()) -> RunSpec:
    """The run that the checked ``cfg`` describes; the records get the ``overrides``."""
    config = redact_values(OmegaConf.to_container(cfg, resolve=True))
    trainer, cluster = cfg.trainer, config["cluster"]
    strategy = config["trainer"]["strategy"]
    limits = {k: v for k, v in config["trainer"].items() if k.startswith("max_")}
    patience = {
        f"callbacks.{name}.patience": node.get("patience", LIGHTNINGS_PATIENCE)
        for name, node in (config.get("callbacks") or {}).items()
        if str(node.get("_target_")).endswith("EarlyStopping")
    }
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
        split_batches=trainer.get("split_batches", False),
        allow_changes=list(cfg.allow_changes),
        notes=cfg.notes or "",
        tags=list(cfg.tags),
        may_change=load_project_rules(cfg.rules).may_change,
        limits=limits | patience,
        saves_nothing=bool(trainer.fast_dev_run),
        overridden=find_overridden(cfg.choices or {}, list(overrides)),
        another_run="another name (RUN_ID=...)",
    )
