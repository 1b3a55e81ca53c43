"""What the values of your own keys in configs/ may be, where their default cannot say it.

A key without a rule takes values of its default's type. A rule names one full key. Arguments of
nets, optimizers and schedules need no rule: their constructors refuse wrong values by a ValueError,
which ends the run before anything is written. Imports no torch, because help and errors are quick.
"""

from collections.abc import Iterator

from omegaconf import DictConfig

from samestep.config.rules import ABOVE_0, BELOW_1, NULL, TEXT, Rule, each, whole

RULES: dict[str, Rule] = {
    "data.root": TEXT,
    "data.global_batch_size": whole(1),
    "data.eval_batch_size": whole(1),
    "data.num_workers": whole(0),
    "data.seed": whole(0, 2**32 - 1),
    "data.num_channels": whole(1),
    "data.image_size": whole(1),
    "data.num_classes": whole(2),
    "data.class_names": NULL | each(TEXT),
    "data.num_val": whole(1),
    "data.std": each(ABOVE_0),
    "data.crop_padding": whole(0),
    "model.label_smoothing": BELOW_1,
    "model.optimizer.lr": ABOVE_0 | NULL,  # some optimizers choose it themselves
    "callbacks.predictions.num_batches_to_log": whole(0),
    "callbacks.predictions.images_per_batch": whole(1),
}

MAY_CHANGE = (  # patterns of keys that may have another value when a run continues
    r"data\.(num_workers|root|download|mirror)",
    r"callbacks\.predictions(\..+)?",
)

METRIC_MODES = {"accuracy": "max"}  # whether less (min) or more (max) of a metric is better

PER_CHANNEL_OR_CLASS = {
    "mean": "num_channels",
    "std": "num_channels",
    "class_names": "num_classes",
}


def contradictions(cfg: DictConfig) -> Iterator[str]:
    """What is wrong with ``cfg`` although each value alone is fine, one line each."""
    is_endless = cfg.trainer.max_epochs == -1 and cfg.trainer.max_steps == -1
    if is_endless and "lr_scheduler" in cfg.model:
        yield (
            "trainer.max_epochs=-1: the learning-rate schedule must know where the run ends; set "
            "trainer.max_epochs or trainer.max_steps"
        )
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
