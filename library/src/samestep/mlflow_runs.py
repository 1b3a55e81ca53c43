"""What MLflow has of a run already: a run that continues logs none of it a second time."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple


class KnownRun(NamedTuple):
    """What MLflow has of a run; by default nothing."""

    number: Any = None  # a text by which MLflow finds it
    params: Mapping[str, str] = {}
    metrics: Collection[str] = ()  # their names


def known_run(found: Any) -> KnownRun:
    """What MLflow has of a run that it has found."""
    return KnownRun(found.info.run_id, found.data.params, found.data.metrics)


def compare_parameters(
    params: Mapping[str, str], before: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The parameters that MLflow does not have yet, and those that have changed since."""
    new, changed = {}, {}
    for key, value in params.items():
        if key not in before:
            new[key] = value
        elif before[key] != value:
            changed[key] = value
    return new, changed


def tag_changed(client: Any, number: str, changed: Mapping[str, str]) -> None:
    """Show the parameters that have changed as tags, because MLflow can change no parameter."""
    for key, value in changed.items():
        client.set_tag(number, f"changed/{key}", value)


def read_metrics(client: Any, run: KnownRun) -> frozenset[tuple[str, int | None, float]]:
    """Names, steps and values of all metrics that MLflow has of a run."""
    known = set()
    for name in run.metrics:
        for metric in client.get_metric_history(run.number, name):
            known.add((metric.key, metric.step, metric.value))
    return frozenset(known)
