"""The model card of an exported model: README.md, as the Hugging Face Hub reads it.

The front matter follows https://huggingface.co/docs/hub/model-cards, without its library.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from samestep.hydra.saved_run import read_saved_config
from samestep.plugins.provenance import packages_of
from samestep.ranks.secrets import redact
from samestep.run import manifest, record
from samestep.run.metrics import is_of_test, read_final_metrics

HUB_LICENCES = {"MIT": "mit", "Apache-2.0": "apache-2.0", "BSD-3-Clause": "bsd-3-clause"}

PAGE = """---
{front}---

# {name}

{what}

{metrics}

- **Data**: `data={data}`
- **Net**: `{net}`, `{weights}` parameters.
- **Command**: `{command}`
- **Commit**: {commit}
- **Versions**: {versions}

## Use

```python
import torch

program = torch.export.load("model.pt2").module()
outputs = program({names})  # of {shapes}
```

`model.safetensors` holds the weights, and `config.yaml` what rebuilds the model.
"""


def write_card(
    run_dir: Path,
    ckpt: str,
    class_names: Sequence[str],
    *,
    num_weights: int,
    licence: str | None,
    inputs: Sequence[str],
) -> str:
    """The text of a model card. It holds no secrets and no paths or addresses of this machine.

    Args:
        run_dir: a finished run.
        ckpt: name of the checkpoint whose weights were exported; the card shows their test.
        class_names: names of the classes; empty if the model is no classifier.
        num_weights: number of parameters.
        licence: of the weights, as in SPDX; None leaves it out.
        inputs: types and shapes of what the program takes, such as ``uint8 [B, 1, 8, 8]``.
    """
    cfg = read_saved_config(run_dir)
    metrics = read_metrics(run_dir, ckpt)
    known = record.read(run_dir)
    net = cfg.model.get("net", cfg.model)
    what = "A PyTorch model."
    if class_names:
        what = f"A classifier of {len(class_names)} classes: {', '.join(class_names)}."
    names = "x"
    if len(inputs) > 1:
        names = ", ".join(f"x{number}" for number in range(len(inputs)))
    packages = packages_of(known)
    versions = [f"{name} {packages[name]}" for name in ("lightning", "torch") if name in packages]
    front = front_matter(cfg, metrics, class_names, licence, inputs)
    return PAGE.format(
        front=yaml.safe_dump(front, sort_keys=False, allow_unicode=True),
        name=cfg.run_id,
        what=what,
        metrics=describe_metrics(metrics, ckpt),
        data=cfg.choices.data,
        net=net["_target_"].rpartition(".")[2],
        weights=num_weights,
        command=describe_command(known.start),
        commit=describe_commit(known.start),
        versions=", ".join(versions),
        names=names,
        shapes=", ".join(inputs),
    )


def front_matter(
    cfg: DictConfig,
    metrics: Mapping[str, float],
    class_names: Sequence[str],
    licence: str | None,
    inputs: Sequence[str],
) -> dict[str, Any]:
    """What the Hub reads: task, licence and results."""
    takes_images = len(inputs) == 1 and inputs[0].count(",") == 3  # [B, C, H, W]
    task = "image-classification" if class_names and takes_images else "other"
    front: dict[str, Any] = {
        "library_name": "pytorch",
        "pipeline_tag": task,
        "tags": ["lightning", "hydra", "samestep"],
    }
    if licence:
        # The Hub knows a fixed list; any other licence needs a name beside "other".
        front["license"] = HUB_LICENCES.get(licence, "other")
        if front["license"] == "other":
            front["license_name"] = licence.lower()
    if metrics:
        values = []
        for name, value in metrics.items():
            # The stage stands at either end, as `is_of_test` knows it.
            kind = re.sub(r"^test[/_]|[/_]test$", "", name)
            values.append({"type": kind, "name": name, "value": value})
        data = str(cfg.choices.data)
        dataset = {"name": data, "type": data}
        result = {"task": {"type": task}, "dataset": dataset, "metrics": values}
        front["model-index"] = [{"name": str(cfg.run_id), "results": [result]}]
    return front


def describe_metrics(metrics: Mapping[str, float], ckpt: str) -> str:
    """A table of the metrics of the test."""
    if not metrics:
        return f"The checkpoint `{ckpt}` was not tested."
    rows = [f"| {name} | {value:.4f} |" for name, value in metrics.items()]
    return "\n".join(["| metric | value |", "|---|---|", *rows])


def describe_command(start: Mapping[str, Any]) -> str:
    """The command that trained the model, fit to be published."""
    command = redact(" ".join(["python", *start.get("command", ["train.py"])]))
    # Addresses, and paths that only this machine has, are left out.
    return re.sub(r"(?<=[\s=\[,'\"])(?:\w+://|~|/)[^\s\],'\"]*", "...", command)


def describe_commit(start: Mapping[str, Any]) -> str:
    """The commit of the code that trained the model."""
    git = start.get("git", {})
    if not git.get("commit"):
        return "unknown"
    commit = str(git["commit"])
    if git.get("dirty"):
        commit += ", with uncommitted changes"
    return commit


def read_metrics(run_dir: Path, ckpt: str) -> dict[str, float]:
    """The finite metrics of the test, if these weights were tested; not those of each class."""
    # After a run was continued, metrics.json has the test of older weights.
    is_finished = record.read(run_dir).state == record.FINISHED
    if not is_finished or ckpt != manifest.tested_checkpoint(run_dir):
        return {}
    found = {}
    for name, value in sorted((read_final_metrics(run_dir) or {}).items()):
        # Metrics of single classes, which end in a number, would fill the page. null is nan.
        is_of_class = re.search("[0-9]$", name)
        if not is_of_test(name) or is_of_class or not isinstance(value, int | float):
            continue
        if math.isfinite(value):
            found[name] = value
    return found
