"""One run, one directory: beginning it, continuing it, reading it back.

runs/<run_id>/
    config.yaml        the whole configuration, resolved, without secrets
    metrics.json       the final figures; exists once the run is finished
    metrics.csv        the figures over time
    checkpoints/       best.ckpt by validation accuracy, last.ckpt to continue from, manifest.json
    predictions/       pictures of test images
    logs/              environment.json, git.diff, rank-<n>.log
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import re
import shlex
import statistics
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from samestep.errors import ConfigError
from samestep.ranks.secrets import redacted
from samestep.run.records import read_history, record_attempt, write_text

if TYPE_CHECKING:
    import lightning as L

HARMLESS = re.compile(  # what a run may change when it continues, without becoming another run
    r"trainer\.(max_(epochs|steps|time)|devices|num_nodes|accelerator|strategy|profiler"
    r"|default_root_dir|enable_\w+)"
    r"|(cluster|logger|callbacks\.(artifacts|progress|predictions))(\..+)?"
    r"|callbacks\.(\w+\.dirpath|last\.every_s|loss_guard\.max_skipped)"
    r"|data\.(num_workers|root|download|mirror)"
    r"|run_root|run_dir|run_id|allow_changes"
)


CLAIM_TIMEOUT_S = 10
_claimed: set[Path] = set()


class State(NamedTuple):
    """How far a run has come."""

    finished: bool
    ckpt_path: str | None  # to continue from; None where the run begins


def begin(cfg: DictConfig, argv: list[str]) -> State:
    """Open the run directory, new or old, of the command line ``argv``; on rank zero only.

    Raises:
        ConfigError: if the directory holds another run, or cannot be written.
    """
    from samestep.run import artifacts  # torch, which looking at runs does not need
    from samestep.run.checkpoint import newest

    run_dir = Path(cfg.run_dir)
    url = OmegaConf.select(cfg, "callbacks.artifacts.url")
    if url and not list(run_dir.glob("checkpoints/*.ckpt")):
        artifacts.fetch(url, run_dir)
    changed = differences(cfg)
    further = any(
        new in (None, -1) or (old not in (None, -1) and new > old)  # None and -1: no limit
        for key, (old, new) in changed.items()
        if key.startswith("trainer.max_")
    )
    if (run_dir / "metrics.json").exists() and not further:
        print("Nothing to do, the run is finished. RUN_ID=<another name> begins a new one.")
        print(summary(run_dir), flush=True)
        return State(finished=True, ckpt_path=None)
    try:
        claim(run_dir)
        last = newest(run_dir / "checkpoints")
        stale = ["metrics.json"] if last else ["metrics.json", "metrics.csv"]
        for name in ("checkpoints", "logs"):
            (run_dir / name).mkdir(parents=True, exist_ok=True)
        for name in stale:
            (run_dir / name).unlink(missing_ok=True)
        write_text(run_dir / "config.yaml", OmegaConf.to_yaml(resolved(cfg)))
        record_attempt(run_dir / "logs", argv, cfg.seed)
    except OSError as error:
        raise ConfigError(
            f"run_dir={run_dir} cannot be written: {error.strerror}; make room or get permission "
            "there, or choose another directory with run_root=..."
        ) from error
    lines = [f"  {key}: {old} -> {new}" for key, (old, new) in changed.items()]
    print(f"{'Continuing' if last else 'Run'}: {run_dir}", *lines, sep="\n", flush=True)
    return State(finished=False, ckpt_path=str(last) if last else None)


def claim(run_dir: Path) -> None:
    """Own the run directory until this process ends, however it ends.

    Waits a moment for an owner that is about to end: an evicted pod, a rank that was restarted.

    Raises:
        ConfigError: naming the owner, if another process trains in this directory.
    """
    if run_dir.absolute() in _claimed:
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    file = os.open(run_dir / ".claim", os.O_RDWR | os.O_CREAT)  # closed by the process's end
    for _ in range(CLAIM_TIMEOUT_S):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(1)
            continue
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {platform.node()} since {now}".encode())
        _claimed.add(run_dir.absolute())
        return
    owner = os.read(file, 200).decode()
    os.close(file)
    raise ConfigError(
        f"{run_dir} is being trained by {owner}; wait for it or stop it, or begin another "
        "run with RUN_ID=<another name>"
    )


def best_checkpoint(cfg: DictConfig) -> str | None:
    """The checkpoint to test, or None where nothing was saved, as in ``debug=fast``."""
    path = Path(cfg.run_dir) / "checkpoints" / "best.ckpt"
    return str(path) if path.exists() else None


def finish(cfg: DictConfig, metrics: dict[str, float], *, seconds: float) -> dict[str, float]:
    """Write ``metrics.json``, which ends the run (nan is null), and say so; on rank zero only."""
    run_dir = Path(cfg.run_dir)
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    write_text(run_dir / "metrics.json", json.dumps(finite, indent=2, sort_keys=True) + "\n")
    print(summary(run_dir, seconds), flush=True)
    return metrics


def summary(run_dir: Path, seconds: float | None = None) -> str:
    """Figures, files, and what to type next; ``seconds``: how long this process trained."""
    metrics = json.loads((run_dir / "metrics.json").read_text())
    attempts = json.loads((run_dir / "logs" / "environment.json").read_text())
    rows = read_history(run_dir)
    epochs = int(max((row["epoch"] for row in rows if "train/loss" in row), default=-1)) + 1
    facts = {"epochs": str(epochs)}
    for name in ("test/accuracy", "test/loss"):
        if metrics.get(name) is not None:
            facts[name] = f"{metrics[name]:.4f}"
    if validated := [row for row in rows if "val/accuracy" in row]:
        best = max(validated, key=lambda row: row["val/accuracy"])
        facts["val/accuracy"] = f"{best['val/accuracy']:.4f} in epoch {best['epoch'] + 1:.0f}"
    if seconds is not None:
        facts["time"] = f"{timedelta(seconds=round(seconds))} h:m:s"
    speed = "train/images_per_second"
    if speeds := [row[speed] for row in rows if speed in row]:
        facts["images/s"] = f"{statistics.median(speeds):,.0f}"
    words = [word for word in attempts[-1]["command"][1:] if not word.startswith("trainer.max_")]
    again = shlex.join(["python", "train.py", *words, f"trainer.max_epochs={2 * epochs}"])
    return "\n".join(
        [
            f"Finished: {run_dir}",
            *(f"  {name:<14} {fact}" for name, fact in facts.items()),
            "Look at",
            f"  {run_dir}/predictions     test images with guesses, and the confusion matrix",
            f"  {run_dir}/metrics.csv     every epoch",
            "Next",
            f"  python scripts/evaluate.py run={run_dir}",
            f"  python scripts/predict.py run={run_dir} image.png",
            f"  RUN_ID={run_dir.name} {again}",
        ]
    )


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """``cfg`` as it is saved: plain containers, every reference resolved, without secrets."""
    plain: dict[str, Any] = redacted(OmegaConf.to_container(cfg, resolve=True))
    return plain


def saved(run_dir: Path) -> DictConfig:
    """The configuration a run was started with; ConfigError if ``run_dir`` holds no run."""
    path = run_dir / "config.yaml"
    if not path.exists():
        raise ConfigError(f"{run_dir} is not a run, such as runs/<run_id>: it has no config.yaml")
    cfg = OmegaConf.load(path)
    assert isinstance(cfg, DictConfig)
    return cfg


def differences(cfg: DictConfig) -> dict[str, tuple[Any, Any]]:
    """Each key whose value is not that of the run in ``cfg.run_dir``: saved value and new value.

    Raises:
        ConfigError: naming every difference that would make it another run.
    """
    if not (Path(cfg.run_dir) / "config.yaml").exists():
        return {}
    old = _flat(OmegaConf.to_container(saved(Path(cfg.run_dir))))
    new = _flat(resolved(cfg))
    pairs = {key: (old.get(key, "absent"), new.get(key, "absent")) for key in {**old, **new}}
    changed = {key: (before, after) for key, (before, after) in pairs.items() if before != after}
    refused = [k for k in changed if not HARMLESS.fullmatch(k) and k not in cfg.allow_changes]
    if refused:
        lines = "".join(f"\n  {key}: {changed[key][0]} -> {changed[key][1]}" for key in refused)
        raise ConfigError(
            f"{cfg.run_dir} holds a run with another configuration:{lines}\n"
            "Use another name (RUN_ID=...) for the new values, or repeat the old ones; or take the "
            f"new ones into this run: 'allow_changes=[{','.join(refused)}]'"
        )
    return changed


def _flat(node: Any, key: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``; lists are values."""
    if not isinstance(node, dict):
        return {key: node}
    return {
        path: value
        for name, item in node.items()
        for path, value in _flat(item, f"{key}.{name}" if key else str(name)).items()
    }


def load_run(
    run_dir: str | Path, ckpt: str = "best"
) -> tuple[L.LightningModule, L.LightningDataModule]:
    """Rebuild the model, in evaluation mode on the CPU, and the data of a run, not yet set up.

    ``run_dir`` is all that is needed; ``ckpt`` is ``"best"`` or ``"last"``.

    Raises:
        ConfigError: if ``run_dir`` holds no run, or the run no such checkpoint.
    """
    cfg = saved(Path(run_dir))
    checkpoints = Path(run_dir) / "checkpoints"
    path = checkpoints / f"{ckpt}.ckpt"
    if not path.exists():
        names = [file.stem for file in sorted(checkpoints.glob("*.ckpt"))]
        raise ConfigError(f"ckpt={ckpt}: {checkpoints} holds {', '.join(names) or 'no checkpoint'}")
    from samestep import build
    from samestep.run import checkpoint

    model, datamodule = build.model(cfg), build.datamodule(cfg)
    state = checkpoint.load(path)
    model.load_state_dict(state["state_dict"])
    datamodule.load_state_dict(state[type(datamodule).__name__])
    return model.eval(), datamodule
