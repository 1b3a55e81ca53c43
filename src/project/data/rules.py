"""What values the keys of images may have; ``project.rules`` adds them. Imports no torch."""

import re
from collections.abc import Iterator

from omegaconf import DictConfig

from samestep.hydra.rules import ABOVE_0, BELOW_1, BOOL, NODE, NULL, TEXT, Rule, each, whole

ADDRESS = Rule(
    "an address such as http://host/path",
    lambda v: isinstance(v, str) and bool(re.match(r"(https?|ftp|file)://.", v)),
)
RULES: dict[str, Rule] = {
    "data.root": TEXT,
    "data.mirror": NULL | ADDRESS,
    "data.num_channels": whole(1),
    "data.image_size": whole(1),
    "data.num_classes": whole(2),
    "data.class_names": NULL | each(TEXT),
    "data.num_val": NULL | whole(1),
    "data.std": each(ABOVE_0),
    "data.crop_padding": whole(0),
    "data.shuffle": BOOL | NODE,
    "model.label_smoothing": BELOW_1,
}

MAY_CHANGE = [
    r"data\.(root|download|mirror)",
    r"callbacks\.predictions(\..+)?",
]


def contradictions(cfg: DictConfig) -> Iterator[str]:
    """What is wrong with the data although each value alone is fine, one line each."""
    counts = {"mean": "num_channels", "std": "num_channels", "class_names": "num_classes"}
    for key, count in counts.items():
        values, num = cfg.data.get(key), cfg.data.get(count)
        # Another DataModule may have other keys.
        if values is not None and num is not None and len(values) != num:
            yield f"data.{key}={values}: must have one for each of data.{count}={num}"
    names = cfg.data.get("class_names") or []
    if len(set(names)) < len(names):
        yield f"data.class_names={names}: each must be another name"


def needed_files(cfg: DictConfig) -> list[str]:
    """The files of a data set that the run does not download."""
    data = cfg.data
    if data.get("download", True) or "source" not in data:
        return []
    if data.source["_target_"].endswith(".ImageFolder"):
        return [f"{data.root}/train", f"{data.root}/test"]
    return [f"{data.root}/{name}" for name in data.source.get("files", ())]
