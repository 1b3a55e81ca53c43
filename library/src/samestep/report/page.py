"""``report.html``: one run on one page that needs no other file and no network."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.config_keys import KeyScope, scope_of
from samestep.plugins.provenance import packages_of
from samestep.report import charts, summary, wall_time
from samestep.report.files import Run, read_predictions, read_run, show, show_value
from samestep.run import metrics, record
from samestep.run.files import write_text
from samestep.run_spec import select

if TYPE_CHECKING:
    from jinja2 import Environment

log = logging.getLogger(__name__)

NAME = summary.REPORT


def write_or_warn(run_dir: Path) -> None:
    """Write the report at the end of a run; on rank zero only.

    A report that fails is a warning: the run and its results are complete without it.
    """
    try:
        write(run_dir)
    # Any exception: an unforeseen file in `predictions` must not turn a finished run into a failed
    # one.
    except Exception as error:
        log.warning(
            "%s was not written: %s: %s. `samestep report %s` tries again",
            run_dir / NAME,
            type(error).__name__,
            error,
            run_dir,
        )


def write(run_dir: Path) -> Path:
    """Write the report of a run, which may still be training, and return its path."""
    path = run_dir / NAME
    write_text(path, page_of(read_run(run_dir)))
    return path


def page_of(run: Run) -> str:
    """The page of a run."""
    final_metrics = {}
    for name, value in sorted(run.final_metrics.items()):
        final_metrics[name] = show(value)
    # A finished run is trained further, an interrupted one only to its own limits.
    num_epochs = None
    if run.status.state == record.FINISHED:
        num_epochs = metrics.count_epochs(run.rows)
    template = templates().get_template("report.html")
    return template.render(
        title=run.name,
        run=run,
        facts=summary.facts_of(run),
        final_metrics=final_metrics,
        charts=charts.charts_of([run]),
        predictions=read_predictions(run.run_dir),
        changed=changed_in(run),
        timeline=timeline_of(run),
        account=wall_time.account_of(run.run_dir, run.status),
        packages=packages_of(run.status),
        describe_repeat=summary.describe_repeat,
        command=summary.resume_command(run.config, run.run_dir, num_epochs),
        # In the page itself, so that it can be sent and opened years later.
        plotly=charts.plotly_text(),
    )


def timeline_of(run: Run) -> list[Mapping[str, Any]]:
    """The starts and ends of a run, and the steps that it has repeated, in order of their times.

    A killed start has left no end.
    """

    def time_of(event: Mapping[str, Any]) -> float:
        return record.timestamp(event.get("started", event.get("time")))

    # Times have whole seconds, and sorted() keeps the order of equal ones: ends stand before starts
    # because a run that is restarted at once ends and starts in the same second.
    return sorted([*run.status.ends, *run.status.starts, *run.status.repeats], key=time_of)


def changed_in(run: Run) -> list[tuple[str, str, str]]:
    """The overrides of the newest start, without names: key, value, and what has set it."""
    changed = []
    for key, source in (run.status.start.get("overridden") or {}).items():
        if scope_of(key) >= KeyScope.COSMETIC:
            continue
        # A group such as model=mlp is shown by its choice, not by the values that it stands for.
        value = select(run.config, f"choices.{key.replace('.', '/')}") or select(run.config, key)
        changed.append((key, show_value(value), source))
    return changed


@cache
def templates() -> Environment:
    """The templates of the pages, which escape every text."""
    # Imported when a page is made: the start of a run does not wait for it.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        # Names, notes and generated texts come from users, or from a model.
        autoescape=True,
        # A misspelt variable is an error in the tests instead of a gap in the page.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["show_value"] = show_value
    return found
