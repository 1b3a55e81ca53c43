"""What the values of your own keys in configs/ may be, where their default cannot say it.

A key without a rule takes values of its default's type. A rule names one full key. Arguments of
nets, optimizers and schedules need no rule: their constructors reject wrong values by ValueError,
which ends the run before anything is written.

Those of images are in ``data/rules.py``, which this file finds and joins. An example has its own
``rules.py``, which ``rules`` in configs/train.yaml names too. None of these files imports torch,
because help and errors are quick.
"""

import importlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig

from samestep.errors import ConfigError
from samestep.hydra.nodes import flatten
from samestep.hydra.rules import ABOVE_0, NULL, Rule, whole

TASKS = [
    importlib.import_module(f"{__package__}.{file.parent.name}.rules")
    for file in sorted(Path(__file__).parent.glob("*/rules.py"))
]

RULES: dict[str, Rule] = {
    "data.global_batch_size": whole(1),
    "data.eval_batch_size": whole(1),
    "data.num_workers": whole(0),
    "data.seed": whole(0, 2**32 - 1),
    "model.optimizer.lr": ABOVE_0 | NULL,  # some optimizers choose it themselves
}

# Patterns of keys that may have another value when a run continues.
MAY_CHANGE: list[str] = [r"data\.num_workers"]

for task in TASKS:
    RULES |= getattr(task, "RULES", {})
    MAY_CHANGE += getattr(task, "MAY_CHANGE", [])


def contradictions(cfg: DictConfig) -> Iterator[str]:
    """What is wrong with ``cfg`` although each value alone is fine, one line each."""
    for task in TASKS:
        if hasattr(task, "contradictions"):
            yield from task.contradictions(cfg)
    # Keys of the data that the model refers to, and that these data do not have.
    texts = " ".join(str(leaf.text) for leaf in flatten(cfg.model).values())
    names = dict.fromkeys(re.findall(r"\$\{data\.(\w+)", texts))
    if missing := [f"data.{name}" for name in names if name not in cfg.data]:
        yield (
            f"{cfg.model.get('_target_')} needs {', '.join(missing)}, which "
            f"{cfg.data.get('_target_', 'data=null')} does not have; choose data and a model of "
            "one task"
        )
    optimizer = cfg.model.get("optimizer") or {}
    target = str(optimizer.get("_target_"))
    if target.startswith("torch.optim.") and optimizer.get("lr", 1) is None:
        yield f"model.optimizer.lr=null: {target} needs a number above 0"
    if cfg.trainer.max_epochs == cfg.trainer.max_steps == -1 and "lr_scheduler" in cfg.model:
        yield (
            "trainer.max_epochs=-1: the learning-rate schedule must know where the run ends; set "
            "trainer.max_epochs or trainer.max_steps"
        )


def needed_files(cfg: DictConfig) -> list[str]:
    """The files that must be there before a run starts, because it does not download them."""
    return [f for task in TASKS if hasattr(task, "needed_files") for f in task.needed_files(cfg)]


def check_ranks(cfg: DictConfig, num_ranks: Sequence[int]) -> Iterator[str]:
    """What a run rejects if it may get these numbers of ranks, such as 1, 2 and 3.

    ``samestep launch`` asks this before a run is submitted. Each rank asks ``check_batch_size``.
    """
    if "global_batch_size" in cfg.data:  # another DataModule may not have the key
        batches_per_step = cfg.trainer.accumulate_grad_batches
        try:
            check_batch_size(cfg.data.global_batch_size, max(num_ranks), batches_per_step)
        except ConfigError as error:
            yield str(error)


def check_batch_size(global_batch_size: int, num_ranks: int, batches_per_step: int) -> None:
    """Raise a ConfigError if a rank would get no sample of a batch."""
    needed = num_ranks * batches_per_step
    if global_batch_size >= needed:
        return
    parts = f"{num_ranks} ranks"
    if batches_per_step > 1:
        parts += f" x trainer.accumulate_grad_batches={batches_per_step}"
    raise ConfigError(
        f"data.global_batch_size={global_batch_size}: must be at least {needed}, one sample for "
        f"each of {parts}"
    )
