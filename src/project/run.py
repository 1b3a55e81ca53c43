"""One run, one directory: beginning it, continuing it, reading it back.

runs/<run_id>/
    config.yaml        the whole configuration, resolved, without secrets
    metrics.json       the final figures; exists once the run is finished
    metrics.csv        the figures over time
    checkpoints/       best.ckpt by validation accuracy, last.ckpt to continue from
    predictions/       pictures of test images
    logs/              environment.json, git.diff, rank-<n>.log

Torch is imported only where a model is loaded.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from omegaconf import DictConfig, OmegaConf

from project.config import ConfigError
from project.records import record_attempt, redacted, write_text
from project.summary import summary

if TYPE_CHECKING:
    from project.classifier import ImageClassifier
    from project.data import ImageDataModule

LIMITS = ("trainer.max_epochs", "trainer.max_steps", "trainer.max_time")
HARMLESS = re.compile(  # what a run may change when it continues, without becoming another run
    r"trainer\.(max_(epochs|steps|time)|devices|num_nodes|accelerator|strategy|profiler"
    r"|default_root_dir|enable_\w+)"
    r"|(cluster|logger|callbacks\.(progress|predictions))(\..+)?"
    r"|callbacks\.\w+\.dirpath"
    r"|data\.(num_workers|root|download|mirror)"
    r"|run_root|run_dir|run_id"
)


class State(NamedTuple):
    """How far a run has come."""

    finished: bool
    ckpt_path: str | None
    """Checkpoint to continue from; None where the run begins."""


def begin(cfg: DictConfig, argv: list[str]) -> State:
    """Open the run directory, new or old; to be called on rank zero.

    Args:
        cfg: the composed configuration.
        argv: the command line, kept in ``logs/environment.json``.

    Raises:
        ConfigError: if the directory holds another run, or cannot be written.
    """
    changes = compare(cfg)
    run_dir = Path(cfg.run_dir)
    if is_finished(cfg):
        print(
            f"Nothing to do, the run is finished. RUN_ID=<another name> begins a new one.\n"
            f"{summary(run_dir)}"
        )
        return State(finished=True, ckpt_path=None)
    prepare(cfg, argv)
    last = run_dir / "checkpoints" / "last.ckpt"
    print(
        f"{'Continuing' if last.exists() else 'Run'}: {run_dir}", *changes, sep="\n  ", flush=True
    )
    return State(finished=False, ckpt_path=str(last) if last.exists() else None)


def best_checkpoint(cfg: DictConfig) -> str | None:
    """The checkpoint to test, or None where nothing was saved, as in ``debug=fast``."""
    path = Path(cfg.run_dir) / "checkpoints" / "best.ckpt"
    return str(path) if path.exists() else None


def finish(cfg: DictConfig, metrics: dict[str, float], *, seconds: float) -> dict[str, float]:
    """Write ``metrics.json``, and tell a person what came out; to be called on rank zero."""
    run_dir = Path(cfg.run_dir)
    write_metrics(run_dir, metrics)
    print(summary(run_dir, seconds), flush=True)
    return metrics


def prepare(cfg: DictConfig, argv: list[str]) -> None:
    """Create the run directory and write its first records; to be called on rank zero.

    Args:
        cfg: the composed configuration.
        argv: the command line, kept in ``logs/environment.json``.

    Raises:
        ConfigError: if the directory cannot be written.
    """
    run_dir = Path(cfg.run_dir)
    try:
        for name in ("checkpoints", "logs"):
            (run_dir / name).mkdir(parents=True, exist_ok=True)
        text = OmegaConf.to_yaml(OmegaConf.create(resolved(cfg)))
        config = run_dir / "config.yaml"
        if not config.exists() or config.read_text(encoding="utf-8") != text:
            write_text(config, text)
        record_attempt(run_dir / "logs", argv, cfg.seed)
    except OSError as error:
        raise ConfigError(
            f"run_dir={run_dir} cannot be written: {error.strerror}: {error.filename}; make room "
            "or get permission there, or choose another directory with run_root=..."
        ) from error


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """``cfg`` as it is saved: plain containers, every reference resolved, without secrets."""
    plain: dict[str, Any] = redacted(OmegaConf.to_container(cfg, resolve=True))
    return plain


def saved(run_dir: Path) -> DictConfig:
    """The configuration a run was started with.

    Raises:
        ConfigError: if ``run_dir`` is not the directory of a run.
    """
    path = run_dir / "config.yaml"
    try:
        cfg = OmegaConf.load(path)
    except OSError as error:
        raise ConfigError(
            f"{run_dir} is not a run: {path} cannot be read ({error.strerror}); a run directory "
            "is what train.py leaves, such as runs/<run_id>"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    assert isinstance(cfg, DictConfig)
    return cfg


def differences(cfg: DictConfig) -> dict[str, tuple[Any, Any]]:
    """Each key whose value is not that of the run in ``cfg.run_dir``: saved value and new value."""
    run_dir = Path(cfg.run_dir)
    if not (run_dir / "config.yaml").exists():
        return {}
    old = _flat(OmegaConf.to_container(saved(run_dir)))
    new = _flat(OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(resolved(cfg)))))
    keys = [key for key in {**old, **new} if old.get(key, "absent") != new.get(key, "absent")]
    return {key: (old.get(key, "absent"), new.get(key, "absent")) for key in keys}


def compare(cfg: DictConfig) -> list[str]:
    """Check that the run in ``cfg.run_dir``, if there is one, may go on with ``cfg``.

    Returns:
        One line for each difference that is accepted: limits, devices, places; of loggers which.

    Raises:
        ConfigError: naming every other difference; they would make it another run.
    """
    changed = differences(cfg)
    lines = {key: f"{key}: {old} -> {new}" for key, (old, new) in changed.items()}
    refused = [lines[key] for key in lines if not HARMLESS.fullmatch(key)]
    if refused:
        raise ConfigError(
            f"{cfg.run_dir} holds a run with another configuration:\n  "
            + "\n  ".join(refused)
            + "\nUse another name (RUN_ID=...) for the new values, or repeat the old ones."
        )
    detail = re.compile(r"logger\..*(?<!\._target_)")
    return [line for key, line in lines.items() if not detail.fullmatch(key)]


def is_finished(cfg: DictConfig) -> bool:
    """Whether the run has its final metrics, and ``cfg`` asks for no further training."""
    changed = differences(cfg)
    further = any(_raised(*changed[key]) for key in LIMITS if key in changed)
    return (Path(cfg.run_dir) / "metrics.json").exists() and not further


def _raised(old: Any, new: Any) -> bool:
    """Whether the limit ``new`` is above ``old``; None and -1 are no limit."""
    limited = [value not in (None, -1) for value in (old, new)]
    return bool(new > old) if all(limited) else limited == [True, False]


def _flat(node: Any, key: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``; lists are values."""
    if not isinstance(node, dict):
        return {key: node}
    return {
        path: value
        for name, item in node.items()
        for path, value in _flat(item, f"{key}.{name}" if key else str(name)).items()
    }


def write_metrics(run_dir: Path, metrics: dict[str, float]) -> None:
    """Write ``metrics.json``, which makes the run a finished one. A value that is nan is null."""
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    write_text(run_dir / "metrics.json", json.dumps(finite, indent=2, sort_keys=True) + "\n")


def load_run(run_dir: str | Path, ckpt: str = "best") -> tuple[ImageClassifier, ImageDataModule]:
    """Rebuild the model and the data of a run from its directory alone.

    Args:
        run_dir: directory of the run.
        ckpt: ``"best"`` or ``"last"``.

    Returns:
        The model, in evaluation mode and on the CPU, and its DataModule, not yet set up.

    Raises:
        ConfigError: if ``run_dir`` holds no run, or the run no such checkpoint.
    """
    cfg = saved(Path(run_dir))
    checkpoints = Path(run_dir) / "checkpoints"
    path = checkpoints / f"{ckpt}.ckpt"
    if not path.exists():
        names = [file.stem for file in sorted(checkpoints.glob("*.ckpt"))]
        raise ConfigError(f"ckpt={ckpt}: {checkpoints} holds {', '.join(names) or 'no checkpoint'}")
    import torch

    from project import build

    model, datamodule = build.model(cfg), build.datamodule(cfg)
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["state_dict"])
    datamodule.load_state_dict(state[type(datamodule).__name__])
    return model.eval(), datamodule
