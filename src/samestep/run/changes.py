"""What a run may change when it continues, and what would make it another run."""

import importlib
import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from samestep.config.schema import escape, leaves
from samestep.errors import ConfigError
from samestep.ranks.secrets import redact_values
from samestep.run.identity import digest_of, read_identity

MAY_CHANGE = (  # patterns of our own keys that do not change what is learned
    r"run_root|run_dir|run_id|allow_changes",
    r"rules|report|choices(\..+)?|summary(\..+)?",
    r"(cluster|logger|callbacks\.(artifacts|progress))(\..+)?",
    r"callbacks\.(\w+\.dirpath|last\.every_s|loss_guard\.max_skipped)",
    r"trainer\.(max_(epochs|steps|time)|devices|num_nodes|accelerator|strategy|profiler"
    r"|save_every_n_epochs|enable_\w+|limit_predict_batches|detect_anomaly|benchmark"
    r"|inference_mode|log_every_n_steps)",
)
MAX_MISSING = 10  # keys that config.yaml may lack; with more of them it has been cut


def pattern_of_changes(cfg: DictConfig) -> re.Pattern[str]:
    """What the keys that may change look like: ours, and those of the module ``cfg.rules``."""
    module = OmegaConf.select(cfg, "rules")
    own = importlib.import_module(module).MAY_CHANGE if module else ()
    return re.compile("|".join([*MAY_CHANGE, *own]))


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """``cfg`` as it is saved: plain containers, every reference resolved, without secrets."""
    plain: dict[str, Any] = redact_values(OmegaConf.to_container(cfg, resolve=True))
    return plain


def config_digest(cfg: DictConfig) -> str:
    """A digest of all that would make ``cfg`` another run."""
    may_change = pattern_of_changes(cfg)
    values = flatten(resolved(cfg))
    return digest_of({key: v for key, v in values.items() if not may_change.fullmatch(key)})


def find_changes(cfg: DictConfig) -> dict[str, tuple[Any, Any]]:
    """What ``cfg`` changes in the run that its directory holds: ``{key: (old, new)}``.

    A directory without a checkpoint and without results holds no run yet: any configuration may
    begin in there.

    Raises:
        ConfigError: if it changes what would make another run, or the saved configuration cannot
            be read.
    """
    run_dir = Path(cfg.run_dir)
    if not list(run_dir.glob("checkpoints/*.ckpt")) and not (run_dir / "metrics.json").exists():
        return {}
    if not (run_dir / "config.yaml").exists():
        _check_digest(cfg, run_dir)
        return {}
    old = flatten(OmegaConf.to_container(read_config(run_dir), resolve=True))
    new = flatten(resolved(cfg))
    pairs = {key: (old.get(key, "absent"), new.get(key, "absent")) for key in {**old, **new}}
    changed = {key: (before, after) for key, (before, after) in pairs.items() if before != after}
    # The choices of files only name where values come from.
    changed = {key: pair for key, pair in changed.items() if not key.startswith("choices")}
    may_change = pattern_of_changes(cfg)
    refused = [k for k in changed if not may_change.fullmatch(k) and k not in cfg.allow_changes]
    missing = [key for key in refused if key not in old]
    if len(missing) > MAX_MISSING:
        raise _unreadable(run_dir / "config.yaml", f"it lacks {len(missing)} keys")
    if refused:
        lines = "".join(f"\n  {key}: {changed[key][0]} -> {changed[key][1]}" for key in refused)
        raise ConfigError(
            f"{cfg.run_dir} holds a run with another configuration:{lines}\n"
            "Use another name (RUN_ID=...) for the new values, or repeat the old ones; or take the "
            f"new ones into this run: 'allow_changes=[{','.join(refused)}]'"
        )
    return changed


def read_config(run_dir: Path) -> DictConfig:
    """The configuration that a run was started with.

    Raises:
        ConfigError: if ``run_dir`` holds no run, or its configuration cannot be read.
    """
    path = run_dir / "config.yaml"
    if not path.exists():
        raise ConfigError(f"{run_dir} is not a run: it holds no config.yaml")
    try:
        # Plain YAML: OmegaConf would take a text with ${...} for a reference, which may not exist,
        # or read a variable of the environment. What a run has saved is resolved.
        cfg = OmegaConf.create(escape(yaml.safe_load(path.read_text("utf-8"))))
    except Exception as error:  # of the YAML parser, the text's encoding or the file
        raise _unreadable(path, str(error).splitlines()[0]) from error
    if not isinstance(cfg, DictConfig) or not cfg:
        raise _unreadable(path, "it holds no keys")
    return cfg


def flatten(node: Any) -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``, without groups that have no keys.

    Such a group is no change: ``logger: {} -> absent``.
    """
    return {key: value for key, value in leaves(node).items() if value != {}}


def _check_digest(cfg: DictConfig, run_dir: Path) -> None:
    """Without a saved configuration only its digest tells whether this is the same run."""
    known = read_identity(run_dir).configs
    if known and config_digest(cfg) not in known:
        raise ConfigError(
            f"{run_dir} has lost its config.yaml, and was begun with another configuration than "
            "this one; repeat the old values, or use another name (RUN_ID=...)"
        )


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} cannot be read: {why}. It must be the YAML that the run has written. Restore it, "
        "or delete it (rm -r) to continue with the configuration of the command line"
    )
