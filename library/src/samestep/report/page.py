"""``report.html``: one run on one page that needs no other file and no network.

jinja2 is imported when a page is made: a run that starts does not wait for it.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.keys import Nature, nature_of
from samestep.ranks.secrets import redact
from samestep.report import charts, summary
from samestep.report.files import Run, read_predictions, read_run, timeline
from samestep.run import record
from samestep.run.files import write_text
from samestep.spec import select

if TYPE_CHECKING:
    from jinja2 import Environment

log = logging.getLogger(__name__)

NAME = summary.REPORT
MAX_EPOCHS = 100  # lines of the table of epochs
NO_FACTS = ("command", "config", "overridden", "git", "packages")  # of a start; shown elsewhere
USE = {"system/cpu_cores": "CPU cores in use", "system/memory_gib": "memory, GiB",
       "system/gpu_memory_gib": "GPU memory, GiB"}  # fmt: skip


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


def write(run_dir: Path, path: Path | None = None) -> Path:
    """Write the report of a run, which may still be training.

    Args:
        run_dir: directory of the run.
        path: where to write; None is ``report.html`` in the run directory.

    Returns:
        The path of the report.

    Raises:
        OSError: if it cannot be written.
    """
    path = path or run_dir / NAME
    write_text(path, page_of(read_run(run_dir)))
    return path


def page_of(run: Run) -> str:
    """The page of a run."""
    epochs = run.num_epochs if run.status.state == record.FINISHED else None
    return render(
        "report.html",
        title=run.name,
        plotly=charts.plotly_text(),
        status=run.status,
        problems=[redact(problem) for problem in run.problems],
        facts=facts_of(run),
        figures={name: show(value) for name, value in sorted(run.figures.items())},
        charts=charts.of_runs([run]),
        epochs=epochs_of(run),
        predictions=read_predictions(run.run_dir),
        changed=changed_in(run),
        config=run.config,
        machine=machine_of(run),
        packages=run.status.packages,
        timeline=timeline(run),
        command=summary.command_to_go_on(run.config, run.run_dir, epochs),
    )


def facts_of(run: Run) -> dict[str, str]:
    """The first things that a reader wants to know: data, model, results, and what they cost."""
    chosen = {name: select(run.config, f"choices.{name}") for name in ("data", "model")}
    facts = {name: str(choice) for name, choice in chosen.items() if choice}
    seconds = run.figures.get("time/total_s")
    times = {"training time": f"{seconds:,.1f} s"} if seconds else {}
    facts |= summary.facts_of(run.config, run.figures, run.status, run.rows, times)
    use = {name: [row[name] for row in run.rows if name in row] for name in USE}
    return facts | {USE[name]: f"{statistics.median(use[name]):.1f}" for name in use if use[name]}


def epochs_of(run: Run) -> list[list[str]]:
    """The metrics of each epoch as a table, the heading first; the newest epochs of a long run."""
    hidden = ("test/", "test_", "step/", "system/")
    names = {name for row in run.rows for name in row if not name.startswith(hidden)}
    names -= {"epoch", "step"}
    rows = [row for row in run.rows if names & row.keys()]
    if not rows:
        return []
    rows = rows[-MAX_EPOCHS:]
    columns = [
        [f"{row.get('epoch', -1) + 1:.0f}" for row in rows],
        [f"{row['step'] + 1:.0f}" for row in rows],
        *(align([row.get(name) for row in rows]) for name in sorted(names)),
    ]
    return [["epoch", "step", *sorted(names)], *map(list, zip(*columns, strict=True))]


def align(column: Sequence[float | None]) -> list[str]:
    """A column of figures with the same number of places; None is left out.

    It has five figures of the largest value, unless the smallest would lose most of its own.
    """
    sizes = [abs(value) for value in column if value and math.isfinite(value)]
    places = max(0, 4 - math.floor(math.log10(max(sizes, default=1))))
    if max(sizes, default=1) > 1000 * min(sizes, default=1):
        return ["" if value is None else show(value) for value in column]
    return ["" if value is None else f"{value:,.{places}f}" for value in column]


def machine_of(run: Run) -> dict[str, str]:
    """Machine, processes and code of the newest start."""
    facts = {
        name.replace("_", " "): words_of(value)
        for name, value in run.status.start.items()
        if name not in NO_FACTS and value not in (None, [])
    }
    git = run.status.start.get("git")
    if isinstance(git, dict):
        changed = ", with uncommitted changes (logs/git.diff)" if git.get("dirty") else ""
        facts["commit"] = f"{git.get('commit') or 'not known'}{changed}"
    return facts


def changed_in(run: Run) -> list[tuple[str, str, str]]:
    """What the newest start has overridden, without names: key, value, and what has set it."""
    found = run.status.start.get("overridden")
    changed = []
    for key, source in found.items() if isinstance(found, dict) else ():
        choice = select(run.config, f"choices.{key.replace('.', '/')}")
        value = words_of(choice or select(run.config, key))
        if nature_of(key) < Nature.LOOKS:
            changed.append((key, value, str(source)))
    return changed


def words_of(value: Any) -> str:
    """A value as the YAML of the configuration writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(words_of, value))}]"
    return str(value)


def show(value: float | None) -> str:
    """A figure with as many places as can be read; null stands for nan and infinity."""
    if value is None:
        return "not a number"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.5g}"


def render(template: str, **content: Any) -> str:
    """A page from a template. Every text is escaped."""
    return _environment().get_template(template).render(**content)


def render_part(name: str, *content: Any) -> str:
    """One macro of ``parts.html``, with its arguments."""
    part = getattr(_environment().get_template("parts.html").module, name)
    return str(part(*content))


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = FileSystemLoader(Path(__file__).parent / "templates")
    found = Environment(loader=templates, autoescape=True, undefined=StrictUndefined,
                        trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    found.filters["words"] = words_of
    return found
