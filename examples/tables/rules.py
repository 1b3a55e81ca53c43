"""What the values of the keys of tables may be. Imports no torch.

``rules`` in configs/train.yaml names this module; the other keys of images have theirs in
``project.rules``.
"""

from samestep.rules import NULL, TEXT, Rule

RULES: dict[str, Rule] = {
    "data.tables.val": NULL | TEXT,
    "data.columns": Rule("two names: of the images and of the labels", lambda v: len(v) == 2),
}

# How the rows are read; which rows they are is compared by the digest of the table.
MAY_CHANGE = [r"data\.(num_threads|storage_options(\..+)?|version)"]
