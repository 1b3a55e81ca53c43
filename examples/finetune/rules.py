"""What the values of the keys of fine-tuning may be. Imports no torch.

``rules`` in configs/train.yaml names this module.
"""

from samestep.rules import ABOVE_0, NULL, TEXT, Rule, whole

RULES: dict[str, Rule] = {
    "model.backbone_lr": NULL | ABOVE_0,
    "callbacks.finetuning.weights": NULL | TEXT,
    "callbacks.finetuning.frozen_epochs": whole(0),
}

# A run that continues has its own weights, so the file may be gone.
MAY_CHANGE = [r"callbacks\.finetuning\.weights"]
