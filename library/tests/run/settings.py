"""A run that needs no template: its configuration is a few plain values."""

from pathlib import Path
from typing import Any

from samestep.run.checkpoint import AtomicCheckpointIO, find_valid
from samestep.run_spec import RunSpec

CONFIG = {
    "seed": 0,
    "trainer": {"max_epochs": 2, "max_steps": -1, "max_time": None, "devices": 1},
    "data": {"num_val": 10, "mirror": None},
    "model": {"lr": 0.003},
    "logger": {},
    "summary": {"next": ["evaluate.py {run_dir}"]},
}


def make_spec(run_dir: Path, changes: dict[str, Any] | None = None, **facts: Any) -> RunSpec:
    """A run with other values of these full keys; ``absent`` leaves a key out."""
    config: dict[str, Any] = {
        name: dict(v) if isinstance(v, dict) else v for name, v in CONFIG.items()
    }
    config["run_dir"] = str(run_dir)
    for key, value in (changes or {}).items():
        *groups, name = key.split(".")
        node = config
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = value
        if value == "absent":
            del node[name]
    limits = {name: value for name, value in config["trainer"].items() if name[:4] == "max_"}
    facts = {"run_id": run_dir.name, "seed": config["seed"], "limits": limits} | facts
    return RunSpec(run_dir=run_dir, config=config, another_run="RUN_ID=NAME", **facts)


def save(path: Path, step: int, **content: object) -> None:
    """A checkpoint of this step."""
    checkpoint = {"global_step": step, "state_dict": {}, "loops": {}, **content}
    AtomicCheckpointIO().save_checkpoint(checkpoint, path)


def newest(folder: Path) -> Path | None:
    """The checkpoint from which a run with this folder would continue."""
    found = find_valid(folder)
    return found[0] if found else None
