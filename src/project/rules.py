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


def match(text: str, pattern: str) -> Rule:
    """A string, all of which matches ``pattern``."""
    return Rule(text, lambda v: isinstance(v, str) and bool(re.fullmatch(pattern, v)))


def each(rule: Rule) -> Rule:
    """A list of values that keep ``rule``."""
    text, holds = f"a list, each {rule.text}", rule.holds
    return Rule(text, lambda v: isinstance(v, list) and all(map(holds, v)))


NULL = Rule("null", lambda v: v is None)
BOOL = Rule("true, false", lambda v: isinstance(v, bool))
QUOTED = "text; a number becomes text in quotes within quotes, \"'1'\""
TEXT = match(QUOTED, r"(?s).*\S.*")
ABOVE_0 = number("a number above 0", lambda v: v > 0)
AT_LEAST_0 = number("a number at least 0", lambda v: v >= 0)
BELOW_1 = number("a number at least 0 and below 1", lambda v: 0 <= v < 1)
BETWEEN_0_AND_1 = number("a number above 0 and below 1", lambda v: 0 < v < 1)
SHARE = number("a share from 0.0 to 1.0", lambda v: 0 <= v <= 1)
BATCHES = whole(0) | SHARE
SEED = whole(0, 2**32 - 1)
URL = match("an address such as http://host/path", r"https?://[^\s/]+(/\S*)?")
MD5 = match("an md5 of 32 hexadecimal digits", "[0-9a-f]{32}")
NAME = match(
    f"at most 63 of A-Z a-z 0-9 . _ -, the first a letter or digit, and {QUOTED}",
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}",
)
NO_LIMIT = Rule("-1 (no limit)", lambda v: type(v) is int and v == -1)
METRIC = match("a metric such as val/accuracy", r"(train|val)/\S+")
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "64-true", "bf16-true", "16-true")
STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true", "fsdp")

PARTS = {"mean": "num_channels", "std": "num_channels", "class_names": "num_classes"}

RULES: dict[str, Rule] = {  # patterns of keys, * for any characters: rule; the first one counts
    "seed *.seed": SEED,
    "run_id": NULL | NAME,
    "run_root run_dir data.root": TEXT,
    "data.mirror": NULL | URL,
    "data.source.url": URL,
    "data.source.archives.* data.source.files.*": MD5,
    "data.*_batch_size data.num_channels data.image_size data.num_val": whole(1),
    "data.num_classes": whole(2),
    "data.num_workers data.crop_padding": whole(0),
    "data.class_names": NULL | each(TEXT),
    "data.mean": each(number("a number", math.isfinite)),
    "data.std": each(ABOVE_0),
    "*.lr *.max_lr": ABOVE_0,
    "*.weight_decay": AT_LEAST_0,
    "*.momentum *.dropout *.label_smoothing": BELOW_1,
    "*.betas": each(BELOW_1),
    "*.warmup": SHARE,
    "*.pct_start *.decay": BETWEEN_0_AND_1,
    "*.width *.hidden_size": whole(1),
    "*.channels": each(whole(1)),
    "logger.*.project logger.*.experiment": TEXT,
    "logger.*.entity logger.*.group logger.*.tracking_uri": NULL | TEXT,
    "logger.*.tags": each(TEXT),
    "*.timeout_s *.log_every_s": ABOVE_0,
    "callbacks.*.monitor": NULL | METRIC,
    "callbacks.*.mode": one_of("min", "max"),
    "callbacks.*.patience *.num_batches_to_log": whole(0),
    "*.images_per_batch": whole(1),
    "trainer.accelerator": one_of("auto", "cpu", "gpu", "mps", "tpu"),
    "trainer.devices": one_of("auto") | whole(1),
    "trainer.strategy": one_of(*STRATEGIES),
    "trainer.precision": one_of(*PRECISIONS),
    "trainer.max_epochs trainer.max_steps": whole(1) | NO_LIMIT,
    "trainer.min_epochs trainer.min_steps": NULL | whole(1),
    "trainer.max_time": NULL | match("days:hours:minutes:seconds", r"\d\d:\d\d:\d\d:\d\d"),
    "trainer.limit_*_batches": NULL | BATCHES,
    "trainer.overfit_batches": BATCHES,
    "trainer.fast_dev_run": BOOL | whole(1),
    "trainer.num_nodes trainer.accumulate_grad_batches trainer.log_every_n_steps": whole(1),
    "trainer.check_val_every_n_epoch": whole(1),
    "trainer.val_check_interval": NULL | whole(1) | number("up to 1.0", lambda v: 0 < v <= 1),
    "trainer.num_sanity_val_steps": whole(0) | NO_LIMIT,
    "trainer.gradient_clip_val": NULL | ABOVE_0,
    "trainer.gradient_clip_algorithm": NULL | one_of("norm", "value"),
    "trainer.profiler": NULL | one_of("simple", "advanced", "pytorch"),
    "trainer.deterministic": NULL | BOOL | one_of("warn"),
    "trainer.benchmark": NULL | BOOL,
    "trainer.use_distributed_sampler": Rule("false: ours splits the images", lambda v: v is False),
    "trainer.reload_dataloaders_every_n_epochs": whole(0, 0),
    "trainer.model_registry": NULL | TEXT,
}


def contradictions(cfg: DictConfig) -> Iterator[str]:
    """What is wrong with ``cfg`` although each value alone is fine, one line each."""
    for key, count in PARTS.items():
        values, num = cfg.data.get(key), cfg.data.get(count)
        if None not in (values, num) and len(values) != num:
            yield f"data.{key}={values}: must have one for each of data.{count}={num}"
    epochs, every = cfg.trainer.get("max_epochs"), cfg.trainer.get("check_val_every_n_epoch")
    if epochs == cfg.trainer.get("max_steps") == -1:
        yield "trainer.max_epochs=-1: would never end; set it or trainer.max_steps"
    if None not in (epochs, every) and 0 < epochs < every:
        yield f"trainer.check_val_every_n_epoch={every}: never within trainer.max_epochs={epochs}"
    for name, callback in cfg.callbacks.items():
        monitor, mode = str(callback.get("monitor")), callback.get("mode")
        best = "min" if monitor.endswith("loss") else "max"
        if monitor.endswith(("loss", "accuracy")) and mode not in (None, best):
            yield f"callbacks.{name}.mode={mode}: {monitor} is best at its {best}; say {best}"
    for name in ("best", "last"):
        filename = (cfg.callbacks.get(name) or {}).get("filename")
        if filename != name:
            yield (
                f"callbacks.{name}.filename={filename}: must be {name}; a run reads {name}.ckpt to "
                "be tested and to continue"
            )
