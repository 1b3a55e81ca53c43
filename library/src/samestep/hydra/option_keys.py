"""The keys of configs/ by which messages name the arguments of ``samestep.Trainer``."""

from collections.abc import Mapping
from typing import Any

from samestep import option_names
from samestep.hydra.rules import OF_TRAINER

KEYS = {
    "Trainer": "trainer",
    "run_dir": "run_root",
    "timeout_s": "cluster.timeout_s",
    "shares": "cluster.shares",
    "shutdown_s": "cluster.shutdown_s",
    "allow": "trainer.allow",
    "notice": "trainer.notice",
    "allow_changes": "allow_changes",
    "monitor": "callbacks.checkpoints.monitor",
    "mode": "callbacks.checkpoints.mode",
    "save_every_s": "callbacks.checkpoints.every_s",
    "Checkpoints.dirpath": "callbacks.checkpoints.dirpath",
    "max_skipped": "callbacks.loss_guard.max_skipped",
    "num_workers": "data.num_workers",
    "--rdzv-conf=timeout": "cluster.join_timeout_s",
    # Lightning's own arguments.
    **{key.removeprefix("trainer."): key for key in OF_TRAINER},
}
"""With the callbacks of configs/callbacks."""
WORDS = {"None": "null", "True": "true", "False": "false"}


def use_keys() -> None:
    """Let messages name keys of the configuration, from now on."""
    option_names.use(KEYS, WORDS)


def keys_of(callbacks: Mapping[str, Any]) -> dict[str, str]:
    """The key of each argument, where callbacks may have other names than in configs/callbacks."""
    keys = dict(KEYS)
    for name, callback in callbacks.items():
        kinds = [kind.__name__ for kind in type(callback).__mro__]
        node = f"callbacks.{name}"
        if "Checkpoints" in kinds:
            keys["monitor"] = f"{node}.monitor"
            keys["mode"] = f"{node}.mode"
            keys["save_every_s"] = f"{node}.every_s"
            keys["Checkpoints.dirpath"] = f"{node}.dirpath"
        elif "LossGuard" in kinds:
            keys["max_skipped"] = f"{node}.max_skipped"
        else:
            keys[f"{kinds[0]}.monitor"] = f"{node}.monitor"
            keys[f"{kinds[0]}.mode"] = f"{node}.mode"
    return keys
