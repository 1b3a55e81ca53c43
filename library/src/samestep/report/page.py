"""``report.html``: one run on one page that needs no other file and no network.

jinja2 is imported when a page is made: a run that starts does not wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.keys import Nature, nature_of
from samestep.report import charts, summary
from samestep.report.files import Run, instant, read_predictions, read_run, show, show_value
from samestep.run import metrics, record
from samestep.run.files import write_text
from samestep.spec import select

if TYPE_CHECKING:
    from jinja2 import Environment

log = logging.getLogger(__name__)

NAME = summary.REPORT


def write_or_warn(run_dir: Path) -> None:
    """Write the report at the end of a run; on rank zero only.

    A report that fails is a warning: the run and its results are whole without it.
    """
    try:
        write(run_dir)
    except Exception as error:
        log.warning(
            "%s was not written: %s: %s. `samestep report %s` tries again",
            run_dir / NAME, type(error).__name__, error, run_dir,
        )  # fmt: skip


def write(run_dir: Path) -> Path:
    """Write the report of a run, which may still be training, and return its path."""
    path = run_dir / NAME
    write_text(path, page_of(read_run(run_dir)))
    return path


def page_of(run: Run) -> str:
    """The page of a run."""
    is_finished = run.status.state == record.FINISHED
    epochs = metrics.count_epochs(run.rows) if is_finished else None
    # An end comes before a start of the same second; a start that was killed has left no end.
    events = [*run.status.ends, *run.status.starts]
    return render(
        "report.html",
        run.name,
        [run],
        run=run,
        facts=summary.facts_of(run),
        figures={name: show(value) for name, value in sorted(run.figures.items())},
        predictions=read_predictions(run.run_dir),
        changed=changed_in(run),
        timeline=sorted(events, key=lambda event: instant(event.get("started", event.get("time")))),
        command=summary.command_to_go_on(run.config, run.run_dir, epochs),
    )


def render(template: str, title: str, runs: Sequence[Run], **facts: Any) -> str:
    """A page of one run or of several, with their curves and with what is missing."""
    facts |= {"charts": charts.charts_of(runs), "plotly": charts.plotly_text()}
    return templates().get_template(template).render(title=title, runs=runs, **facts)


def changed_in(run: Run) -> list[tuple[str, str, str]]:
    """What the newest start has overridden, without names: key, value, and what has set it."""
    changed = []
    for key, source in (run.status.start.get("overridden") or {}).items():
        if nature_of(key) < Nature.LOOKS:
            choice = select(run.config, f"choices.{key.replace('.', '/')}")
            changed.append((key, show_value(choice or select(run.config, key)), source))
    return changed


@cache
def templates() -> Environment:
    """The templates of the pages, which escape every text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    files = FileSystemLoader(Path(__file__).parent / "templates")
    found = Environment(loader=files, autoescape=True, undefined=StrictUndefined,
                        trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    found.filters["show_value"] = show_value
    return found
