"""Rules of your own keys in configs/, where the type of their default cannot say them.

This file is optional. Your constructors reject wrong values too, by ValueError, but only after
torch is imported. Nothing here imports torch.
"""

from omegaconf import DictConfig

from samestep import rules

RULES = {
    "data.global_batch_size": rules.whole(1),
    "data.eval_batch_size": rules.whole(1),
    "data.mirror": rules.NULL | rules.TEXT,
    "data.class_names": rules.NULL | rules.each(rules.TEXT),
    "data.num_val": rules.NULL | rules.whole(1),
    "data.shuffle": rules.BOOL | rules.NODE,
    "model.label_smoothing": rules.BELOW_1,
    "model.optimizer.lr": rules.ABOVE_0 | rules.NULL,  # some optimizers choose it themselves
}

# Patterns of keys that may have another value when a run continues.
MAY_CHANGE = [
    r"data\.(root|download|mirror|num_workers)",
    r"model\.compile",  # it rounds in another way
    r"callbacks\.predictions(\..+)?",
]


def needed_files(cfg: DictConfig) -> list[str]:
    """The files without which a run on a cluster would fail, because it does not download them."""
    if cfg.data.get("download", True) or "source" not in cfg.data:
        return []
    names = cfg.data.source.get("files", [])
    if cfg.data.source["_target_"].endswith(".ImageFolder"):
        names = ["train", "test"]
    return [f"{cfg.data.root}/{name}" for name in names]
