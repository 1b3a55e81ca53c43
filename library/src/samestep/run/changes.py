"""What a run may change when it continues, and what would make it another run."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from samestep.config_keys import scope_of
from samestep.errors import ConfigError
from samestep.option_names import setting_of_words
from samestep.run import record
from samestep.run.files import read_text
from samestep.run_spec import RunSpec, leaves


def config_digest(spec: RunSpec) -> str:
    """A digest of all that would make another run."""
    values = flatten(spec.config).items()
    learned = {key: value for key, value in values if not scope_of(key)}
    try:
        text = json.dumps(learned, sort_keys=True, default=str)
    except TypeError:
        # Keys of a file in configs/ may be numbers beside texts, which have no order.
        text = json.dumps(learned, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_changes(spec: RunSpec) -> dict[str, tuple[Any, Any]]:
    """What the configuration changes in the run that its directory holds: ``{key: (old, new)}``.

    A directory without a checkpoint and without results holds no run yet: any configuration may
    begin in there.
    """
    run_dir = spec.run_dir
    if not list(run_dir.glob("checkpoints/*.ckpt")) and not (run_dir / "metrics.json").exists():
        return {}
    if not (run_dir / "config.yaml").exists():
        # Only its digest tells whether this is the same run.
        known = record.read(run_dir).configs
        if known and config_digest(spec) not in known:
            raise ConfigError(
                f"{run_dir} has lost its config.yaml, and was started with another "
                f"configuration; restore the old values, or use {spec.another_run}"
            )
        return {}
    changed = compare(read_config(run_dir), spec.config)
    lines, rejected = "", []
    for key, pair in changed.items():
        if not scope_of(key) and not is_allowed(key, spec.allow_changes):
            lines += f"\n  {key}: {show_change(pair)}"
            rejected.append(key)
    if rejected:
        # With what is allowed already, which the new value of the option would forget.
        allowed = setting_of_words("allow_changes", [*spec.allow_changes, *rejected])
        raise ConfigError(
            f"{run_dir} holds a run with another configuration:{lines}\n"
            f"Use {spec.another_run} for the new values, or restore the old ones; or accept "
            f"the new ones in this run: {allowed}"
        )
    return changed


def is_allowed(key: str, allowed: Sequence[str]) -> bool:
    """Whether ``key`` is one of the allowed keys, or below one: a value may be a whole object."""
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


def show_change(pair: tuple[Any, Any]) -> str:
    """The old value and the new one, in a message."""
    old, new = map(str, pair)
    # The number 1 and the text 1 look alike.
    if old == new:
        old, new = map(repr, pair)
    return f"{old} -> {new}"


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The values that differ between two configurations: ``{key: (old, new)}``."""
    before, after = flatten(old), flatten(new)
    changed = {}
    for key in before | after:
        # The choices of files only name where values come from.
        if key.startswith("choices"):
            continue
        is_in_both = key in before and key in after
        if not is_in_both or comparable(before[key]) != comparable(after[key]):
            changed[key] = before.get(key, "absent"), after.get(key, "absent")
    return changed


def comparable(value: Any) -> Any:
    """A form of a value that is equal for equal values only, as a mapping of YAML has them."""
    if isinstance(value, Mapping):
        # Keys may be numbers in one file, and texts in the other.
        return {str(key): comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [*map(comparable, value)]
    # nan differs from itself; -0.0 equals 0.0, and 1 divided by it is negative.
    if isinstance(value, float) and repr(value) in ("nan", "-0.0"):
        return repr(value)
    return value


def read_config(run_dir: Path) -> dict[str, Any]:
    """The configuration that a run was started with, as plain containers."""
    path = run_dir / "config.yaml"
    if not path.exists():
        raise ConfigError(f"{run_dir} is not a run: it holds no config.yaml")
    try:
        # Python's own parser takes longer than the rest of a start that finds its run finished.
        parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        config = yaml.load(read_text(path), Loader=parser)
    except (yaml.YAMLError, ValueError, OSError) as error:
        config, why = None, str(error).splitlines()[0]
    else:
        why = "it holds no keys"
    if isinstance(config, dict) and config:
        return config
    raise ConfigError(
        f"{path} cannot be read: {why}. It must be the YAML that the run has written. Restore it, "
        "or delete it (rm -r) to continue with the configuration of the command line"
    )


def flatten(node: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``, without groups that have no keys.

    Such a group is no change: ``logger: {} -> absent``.
    """
    return {key: value for key, value in leaves(node).items() if value != {}}
