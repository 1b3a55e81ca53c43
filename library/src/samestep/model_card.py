"""The model card of an exported model: README.md, as the Hugging Face Hub reads it.

The front matter follows https://huggingface.co/docs/hub/model-cards, without its library.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from samestep.hydra.saved_run import read_saved_config
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
    data, metrics = str(cfg.choices.data), read_metrics(run_dir, ckpt)
    takes_images = len(inputs) == 1 and inputs[0].count(",") == 3  # [B, C, H, W]
    task = "image-classification" if class_names and takes_images else "other"
    front: dict[str, Any] = {
        "library_name": "pytorch",
        "pipeline_tag": task,
        "tags": ["lightning", "hydra", "samestep"],
    }
    if licence:
        front["license"] = HUB_LICENCES.get(licence, "other")
        if front["license"] == "other":
            front["license_name"] = licence.lower()
    table = f"The checkpoint `{ckpt}` was not tested."
    if metrics:
        values = []
        for name, value in metrics.items():
            values.append({"type": name[5:], "name": name, "value": value})
        dataset = {"name": data, "type": data}
        result = {"task": {"type": task}, "dataset": dataset, "metrics": values}
        front["model-index"] = [{"name": str(cfg.run_id), "results": [result]}]
        rows = [f"| {name} | {value:.4f} |" for name, value in metrics.items()]
        table = "\n".join(["| metric | value |", "|---|---|", *rows])
    what = "A PyTorch model."
    if class_names:
        what = f"A classifier of {len(class_names)} classes: {', '.join(class_names)}."
    known = record.read(run_dir)
    last = known.start
    git = last.get("git", {})
    changed = ", with uncommitted changes" if git.get("dirty") else ""
    command = redact(" ".join(["python", *last.get("command", ["train.py"])]))
    return PAGE.format(
        front=yaml.safe_dump(front, sort_keys=False, allow_unicode=True),
        name=cfg.run_id,
        what=what,
        metrics=table,
        data=data,
        net=cfg.model.get("net", cfg.model)["_target_"].rpartition(".")[2],
        weights=num_weights,
        # Addresses, and paths that only this machine has, are left out.
        command=re.sub(r"(?<=[\s=\[,'\"])(?:\w+://|~|/)[^\s\],'\"]*", "...", command),
        commit=f"{git['commit']}{changed}" if git.get("commit") else "unknown",
        versions=", ".join(
            f"{name} {version}"
            for name, version in known.packages.items()
            if name in ("lightning", "torch")
        ),
        names=", ".join(f"x{n}" for n in range(len(inputs))) if len(inputs) > 1 else "x",
        shapes=", ".join(inputs),
    )


def read_metrics(run_dir: Path, ckpt: str) -> dict[str, float]:
    """The finite metrics of the test, if these weights were tested; not those of each class."""
    # After a run was continued, metrics.json has the test of older weights.
    is_finished = record.read(run_dir).state == record.FINISHED
    if not is_finished or ckpt != manifest.tested_checkpoint(run_dir):
        return {}
    final = read_final_metrics(run_dir) or {}
    return {
        name: value
        for name, value in sorted(final.items())
        if is_of_test(name)
        and not re.search("[0-9]$", name)
        and isinstance(value, int | float)  # null stands for nan
        and math.isfinite(value)
    }
