"""What the values of your own keys in configs/ may be, where their default cannot say it.

A key without a rule takes values of its default's type. A rule names one full key. Arguments of
nets, optimizers and schedules need no rule: their constructors refuse wrong values by a ValueError,
which ends the run before anything is written. Imports no torch, because help and errors are quick.
"""

# copier: set all = "ABOVE_0, BELOW_1, NULL, TEXT, Rule, each, whole"
# copier: set names = all if "images" in tasks else "ABOVE_0, NULL, Rule, whole"
# copier: set gone = "(?!)" if "language" in tasks else "from project.*\n"
# copier: filter replace(all, names if tasks else "Rule, whole") | regex_replace(gone, "")
import re
from collections.abc import Iterator, Sequence

from omegaconf import DictConfig

from project.language import rules as language
from samestep.config.rules import ABOVE_0, BELOW_1, NULL, TEXT, Rule, each, whole
from samestep.config.schema import flatten

# copier: endfilter
RULES: dict[str, Rule] = {
    "data.global_batch_size": whole(1),
    "data.seed": whole(0, 2**32 - 1),
    "data.num_workers": whole(0),
    # copier: if tasks
    "data.eval_batch_size": whole(1),
    "model.optimizer.lr": ABOVE_0 | NULL,  # some optimizers choose it themselves
    # copier: endif
    # copier: if "images" in tasks
    "data.root": TEXT,
    "data.num_channels": whole(1),
    "data.image_size": whole(1),
    "data.num_classes": whole(2),
    "data.class_names": NULL | each(TEXT),
    "data.num_val": whole(1),
    "data.std": each(ABOVE_0),
    "data.crop_padding": whole(0),
    "model.label_smoothing": BELOW_1,
    "callbacks.predictions.num_batches_to_log": whole(0),
    "callbacks.predictions.images_per_batch": whole(1),
    # copier: endif
    # copier: if "language" in tasks
    **language.RULES,
    # copier: endif
}

MAY_CHANGE = (  # patterns of keys that may have another value when a run continues
    r"data\.num_workers",
    # copier: if "images" in tasks
    r"data\.(root|download|mirror)",
    r"callbacks\.predictions(\..+)?",
    # copier: endif
    # copier: if "language" in tasks
    *language.MAY_CHANGE,
    # copier: endif
)

# Whether less (min) or more (max) of a metric is better.
METRIC_MODES = {
    "accuracy": "max",
    # copier: if "language" in tasks
    **language.METRIC_MODES,
    # copier: endif
}


# copier: if "images" in tasks
PER_CHANNEL_OR_CLASS = {
    "mean": "num_channels",
    "std": "num_channels",
    "class_names": "num_classes",
}


# copier: endif
def contradictions(cfg: DictConfig) -> Iterator[str]:
    """What is wrong with ``cfg`` although each value alone is fine, one line each."""
    # copier: if "images" in tasks
    for key, count in PER_CHANNEL_OR_CLASS.items():
        # Another DataModule may have other keys.
        values, num = cfg.data.get(key), cfg.data.get(count)
        if values is None or num is None:
            continue
        if len(values) != num:
            yield f"data.{key}={values}: must have one for each of data.{count}={num}"
    names = cfg.data.get("class_names") or []
    if len(set(names)) < len(names):
        yield f"data.class_names={names}: each must be another name"
    # copier: endif
    if missing := find_missing_data_keys(cfg):
        yield (
            f"{cfg.model.get('_target_')} needs {', '.join(missing)}, which "
            f"{cfg.data.get('_target_')} does not have; choose data and a model of one task"
        )
    is_endless = cfg.trainer.max_epochs == -1 and cfg.trainer.max_steps == -1
    if is_endless and "lr_scheduler" in cfg.model:
        yield (
            "trainer.max_epochs=-1: the learning-rate schedule must know where the run ends; set "
            "trainer.max_epochs or trainer.max_steps"
        )


def find_missing_data_keys(cfg: DictConfig) -> list[str]:
    """Keys of the data that the model refers to, and that these data do not have."""
    texts = [str(leaf.text) for leaf in flatten(cfg.model).values()]
    names = [name for text in texts for name in re.findall(r"\$\{data\.(\w+)", text)]
    return [f"data.{name}" for name in dict.fromkeys(names) if name not in list(cfg.data)]


# copier: if tasks
def needed_files(cfg: DictConfig) -> list[str]:
    """The files that must be there before a run starts, because it does not download them."""
    # copier: if "language" in tasks
    if files := language.needed_files(cfg):
        return files
    # copier: endif
    # copier: if "images" in tasks
    data = cfg.data
    if not data.get("download", True) and "source" in data:
        if data.source["_target_"].endswith(".ImageFolder"):
            return [f"{data.root}/train", f"{data.root}/test"]
        return [f"{data.root}/{name}" for name in data.source.get("files", ())]
    # copier: endif
    return []


# copier: endif
def check_ranks(cfg: DictConfig, num_ranks: Sequence[int]) -> Iterator[str]:
    """What a run refuses if it may get these numbers of ranks, such as 1, 2 and 3.

    ``action=check`` asks this before a run is submitted. Each rank asks ``check_batch_size``.
    """
    if "global_batch_size" in cfg.data:  # another DataModule may not have the key
        yield from check_batch_size(
            cfg.data.global_batch_size, max(num_ranks), cfg.trainer.accumulate_grad_batches
        )


def check_batch_size(
    global_batch_size: int, num_ranks: int, batches_per_step: int
) -> Iterator[str]:
    """Yield a mistake if a rank would get no sample of a batch."""
    needed = num_ranks * batches_per_step
    if global_batch_size >= needed:
        return
    parts = f"{num_ranks} ranks"
    if batches_per_step > 1:
        parts += f" x trainer.accumulate_grad_batches={batches_per_step}"
    yield (
        f"data.global_batch_size={global_batch_size}: must be at least {needed}, one sample for "
        f"each of {parts}"
    )
