"""What the values of configs/ may be, where their default cannot say it. Imports no torch.

A key without a rule takes values of its default's type. A new rule is one line of ``RULES``.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from omegaconf import DictConfig


class Rule(NamedTuple):
    """What a value must be: in words, as a test, and its choices where it has some."""

    text: str
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] = ()

    def __or__(self, other: "Rule") -> "Rule":
        either = f"{self.text} or {other.text}"
        return Rule(either, lambda v: self.holds(v) or other.holds(v), self.choices + other.choices)


def whole(low: int, high: float = math.inf) -> Rule:
    """An int, but not a bool, from ``low`` to ``high``."""
    text = f"at least {low}" if high == math.inf else f"from {low} to {high}"
    return Rule(f"a whole number {text}", lambda v: type(v) is int and low <= v <= high)


def number(text: str, holds: Callable[[float], bool]) -> Rule:
    """A finite int or float, but not a bool, for which ``holds``."""
    return Rule(text, lambda v: type(v) in (int, float) and math.isfinite(v) and holds(v))


def one_of(*choices: str) -> Rule:
    """One of these words."""
    text = "one of " * (len(choices) > 1) + ", ".join(choices)
    return Rule(text, lambda v: v in choices, choices)


def each(rule: Rule) -> Rule:
    """A list of values that keep ``rule``."""
    text, holds = f"a list, each {rule.text}", rule.holds
    return Rule(text, lambda v: isinstance(v, list) and all(map(holds, v)))


NULL = Rule("null", lambda v: v is None)
BOOL = Rule("true, false", lambda v: isinstance(v, bool))
QUOTED = "text; a number becomes text in quotes within quotes, \"'1'\""
TEXT = Rule(QUOTED, lambda v: isinstance(v, str) and v.strip() != "")
ABOVE_0 = number("a number above 0", lambda v: v > 0)
BELOW_1 = number("a number at least 0 and below 1", lambda v: 0 <= v < 1)
SHARE = number("a share from 0.0 to 1.0", lambda v: 0 <= v <= 1)
BATCHES = whole(0) | SHARE
NAME = Rule(
    f"at most 63 of A-Z a-z 0-9 . _ -, the first a letter or digit, and {QUOTED}",
    lambda v: isinstance(v, str) and bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", v)),
)
COUNTS = Rule(
    "a list of whole numbers, each at least 1", lambda v: v != [] and each(whole(1)).holds(v)
)
CPUS = Rule("text such as 500m", lambda v: bool(re.fullmatch(r"[1-9]\d*m?", str(v))))
NO_LIMIT = Rule("-1 (no limit)", lambda v: type(v) is int and v == -1)
NODE = Rule("a group with a _target_", lambda v: isinstance(v, dict) and "_target_" in v)
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "64-true", "bf16-true", "16-true")

RULES: dict[str, Rule] = {  # patterns of keys, * for any characters: rule; the first one counts
    "seed *.seed": whole(0, 2**32 - 1),
    "run_id": NULL | NAME,
    "allow_changes": each(TEXT),
    "callbacks.artifacts.url": NULL | TEXT,
    "callbacks.artifacts.flush_timeout_s": ABOVE_0,
    "run_root run_dir data.root": TEXT,
    "data.*_batch_size data.num_channels data.image_size data.num_val": whole(1),
    "data.num_classes": whole(2),
    "data.class_names": NULL | each(TEXT),
    "data.std": each(ABOVE_0),
    "*.lr *.max_lr": ABOVE_0,
    "*.momentum *.dropout *.label_smoothing": BELOW_1,
    "*.warmup": SHARE,
    "*.pct_start *.decay": number("a number above 0 and below 1", lambda v: 0 < v < 1),
    "*.width *.hidden_size *.images_per_batch": whole(1),
    "*.channels": each(whole(1)),
    "*.timeout_s *.every_s *.log_every_s": ABOVE_0,
    "callbacks.best.filename": one_of("best"),  # the run is tested with best.ckpt
    "callbacks.*.mode": one_of("min", "max"),
    "data.num_workers data.crop_padding *.num_batches_to_log": whole(0),
    "callbacks.*.patience callbacks.*.max_skipped": whole(0),
    "cluster.image_pull_policy": one_of("IfNotPresent", "Always", "Never"),
    "cluster.namespace cluster.queue cluster.volume": NULL | TEXT,
    "cluster.user": NULL | whole(1),
    "cluster.cpus": whole(1) | CPUS,
    "cluster.devices_per_node": COUNTS,
    "cluster.max_restarts cluster.backoff_limit": whole(0),
    "cluster.min_nodes cluster.max_nodes": whole(1),
    "cluster.cli": one_of("v2", "v1"),
    "cluster.*_s": whole(1),
    "trainer.accelerator": one_of("auto", "cpu", "gpu", "mps", "tpu"),
    "trainer.devices": one_of("auto") | whole(1),
    "trainer.strategy": one_of("auto", "ddp", "ddp_find_unused_parameters_true", "fsdp"),
    "trainer.precision": one_of(*PRECISIONS),
    "trainer.max_epochs trainer.max_steps": whole(1) | NO_LIMIT,
    "trainer.min_epochs trainer.min_steps": NULL | whole(1),
    "trainer.limit_*_batches": NULL | BATCHES,
    "trainer.overfit_batches": BATCHES,
    "trainer.fast_dev_run": BOOL | whole(1),
    "trainer.num_nodes trainer.accumulate_* trainer.log_every_* trainer.check_val_*": whole(1),
    "trainer.val_check_interval": NULL | whole(1) | number("up to 1.0", lambda v: 0 < v <= 1),
    "trainer.num_sanity_val_steps": whole(0) | NO_LIMIT,
    "trainer.gradient_clip_val": NULL | ABOVE_0,
    "trainer.gradient_clip_algorithm": NULL | one_of("norm", "value"),
    "trainer.profiler": NULL | one_of("simple", "advanced", "pytorch") | NODE,
    "trainer.deterministic": NULL | BOOL | one_of("warn"),
    "trainer.use_distributed_sampler": Rule("false: ours splits the images", lambda v: v is False),
}


def contradictions(cfg: DictConfig) -> Iterator[str]:
    """What is wrong with ``cfg`` although each value alone is fine, one line each."""
    if cfg.trainer.strategy == "fsdp":
        if cfg.trainer.accelerator not in {"gpu", "auto"}:
            yield (
                f"trainer.strategy=fsdp: needs GPUs, and trainer.accelerator="
                f"{cfg.trainer.accelerator}; on CPUs use trainer.strategy=ddp"
            )
        if cfg.trainer.gradient_clip_val and cfg.trainer.gradient_clip_algorithm != "value":
            yield "trainer.gradient_clip_algorithm: fsdp clips only by value"
    parts = {"mean": "num_channels", "std": "num_channels", "class_names": "num_classes"}
    for key, count in parts.items():
        values, num = cfg.data.get(key), cfg.data.get(count)
        if None not in (values, num) and len(values) != num:
            yield f"data.{key}={values}: must have one for each of data.{count}={num}"
