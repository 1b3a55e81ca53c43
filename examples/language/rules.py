"""What the values of the keys of text may be. Imports no torch.

``rules`` in configs/train.yaml names this module.
"""

from omegaconf import DictConfig

from samestep.rules import ABOVE_0, BETWEEN_0_AND_1, NULL, TEXT, Rule, whole

RULES: dict[str, Rule] = {
    "data.file": NULL | TEXT,
    "data.val_share": BETWEEN_0_AND_1,
    "data.test_share": BETWEEN_0_AND_1,
    "data.vocabulary_size": whole(2),
    "data.context": whole(1),
    "data.stride": whole(1),
    "callbacks.samples.prompt": TEXT,
    "callbacks.samples.length": whole(1),
    "callbacks.samples.temperature": ABOVE_0,
    "callbacks.samples.seed": whole(0, 2**32 - 1),
}

# The file may have moved when a run continues: its text is compared by a digest.
MAY_CHANGE = [r"data\.file", r"callbacks\.samples(\..+)?"]


def needed_files(cfg: DictConfig) -> list[str]:
    """The file with the text, if the user has named one."""
    file = cfg.data.get("file")
    return [file] if file else []
