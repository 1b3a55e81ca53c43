"""The model card of an exported net: README.md, as the Hugging Face Hub reads it.

The front matter follows https://huggingface.co/docs/hub/model-cards, without its library.
"""

import math
import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from project.saved_run import read_saved_config
from samestep.ranks.secrets import redact
from samestep.run import record
from samestep.run.identity import read_identity
from samestep.run.metrics import read_figures, read_history
from samestep.run.seal import Seal, verify

HUB_LICENCES = {"MIT": "mit", "Apache-2.0": "apache-2.0", "BSD-3-Clause": "bsd-3-clause"}

PAGE = """---
{front}---

# {name}

A net that sorts images into {num_classes} classes: {classes}.

{metrics}

- **Data**: `data={data}`, images as uint8 `{shape}`.
- **Net**: `{net}`, `{weights}` parameters.
- **Command**: `{command}`
- **Commit**: {commit}
- **Versions**: {versions}

## Use

```python
import torch

program = torch.export.load("model.pt2").module()
logits = program(images)  # uint8 {shape} to float32 [B, {num_classes}]
```

`model.safetensors` holds the weights of the net, and `config.yaml` its class, its arguments, the
names of the classes, and mean and std of the images.
"""


def write_card(
    run_dir: Path, ckpt: str, classes: list[str], weights: int, licence: str | None
) -> str:
    """The text of a model card. It holds no secrets and no paths or addresses of this machine.

    Args:
        run_dir: a finished run.
        ckpt: name of the checkpoint whose weights were exported. The card shows their metrics only.
        classes: names of the classes.
        weights: number of parameters.
        licence: of the weights, as in SPDX; None leaves it out.
    """
    cfg = read_saved_config(run_dir)
    metrics = read_metrics(run_dir, ckpt)
    is_tested = any(name.startswith("test/") for name in metrics)
    untested = "" if is_tested else f"The checkpoint `{ckpt}` was not tested."
    known = record.read(run_dir)
    last = known.start
    return PAGE.format(
        front=front_matter(cfg, metrics, licence),
        name=cfg.run_id,
        classes=", ".join(classes),
        metrics="\n\n".join(filter(None, (to_table(metrics), untested))),
        data=cfg.choices.data,
        net=cfg.model.net["_target_"].rpartition(".")[2],
        weights=weights,
        command=hide_places(["python", *last.get("command", ["train.py"])]),
        commit=describe_commit(last.get("git", {})),
        versions=", ".join(
            f"{name} {version}"
            for name, version in known.packages.items()
            if name in ("lightning", "torch")
        ),
        num_classes=cfg.data.num_classes,
        shape=f"[B, {cfg.data.num_channels}, {cfg.data.image_size}, {cfg.data.image_size}]",
    )


def front_matter(cfg: DictConfig, metrics: dict[str, float], licence: str | None) -> str:
    """The metadata, as YAML."""
    results = [
        {"type": name.partition("/")[2], "name": name, "value": value}
        for name, value in metrics.items()
        if name.startswith("test/")
    ]
    data = str(cfg.choices.data)
    metadata: dict[str, Any] = {
        "library_name": "pytorch",
        "pipeline_tag": "image-classification",
        "tags": ["lightning", "hydra", "samestep"],
    }
    if licence:
        metadata["license"] = HUB_LICENCES.get(licence, "other")
        if metadata["license"] == "other":
            metadata["license_name"] = licence.lower()
    if results:
        dataset, task = {"name": data, "type": data}, {"type": "image-classification"}
        result = {"task": task, "dataset": dataset, "metrics": results}
        metadata["model-index"] = [{"name": str(cfg.run_id), "results": [result]}]
    return yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)


def to_table(metrics: dict[str, float]) -> str:
    """Rows of Markdown; empty without metrics."""
    rows = [f"| {name} | {value:.4f} |" for name, value in metrics.items()]
    return "\n".join(["| metric | value |", "|---|---|", *rows] if rows else [])


def read_metrics(run_dir: Path, ckpt: str) -> dict[str, float]:
    """The finite metrics of these weights in validation and test; not those of each class.

    metrics.json has the newest validation, and after a run was continued the test of older weights.
    """
    metrics: dict[str, Any] = {}
    seal = verify(run_dir / "checkpoints" / f"{ckpt}.ckpt", read_identity(run_dir))
    if isinstance(seal, Seal):
        # A validation is logged at the last step before it.
        rows = [r for r in read_history(run_dir) if r["step"] == seal.global_step - 1]
        metrics |= {n: v for row in rows for n, v in row.items() if n.startswith("val/")}
    is_finished = record.read(run_dir).state == record.FINISHED
    if is_finished and ckpt == record.tested_checkpoint(run_dir):
        final = read_figures(run_dir) or {}
        metrics |= {name: v for name, v in final.items() if name.startswith("test/")}
    return {
        name: value
        for name, value in sorted(metrics.items())
        if re.fullmatch(r"(val|test)/[a-z_]*[a-z]", name)
        and isinstance(value, int | float)  # null stands for nan
        and math.isfinite(value)
    }


def hide_places(command: list[str]) -> str:
    """The command without secrets, addresses, and paths that only this machine has."""
    text = redact(" ".join(command))
    return re.sub(r"(?<=[\s=\[,'\"])(?:\w+://|~|/)[^\s\],'\"]*", "...", text)


def describe_commit(git: dict[str, Any]) -> str:
    """``3f2a...``, and whether files were changed after it."""
    if not git.get("commit"):
        return "unknown"
    return f"{git['commit']}{', with uncommitted changes' if git.get('dirty') else ''}"
