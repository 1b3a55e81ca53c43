"""``report.html``: one run on one page that needs no other file and no network.

matplotlib and jinja2 are imported when a page is made: a run that starts does not wait for them.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from samestep.ranks.secrets import redact
from samestep.report import summary
from samestep.report.files import Run, read_predictions, read_run, timeline
from samestep.run import record
from samestep.run.files import write_text
from samestep.spec import select

if TYPE_CHECKING:
    from jinja2 import Environment

log = logging.getLogger(__name__)

NAME = summary.REPORT
MAX_EPOCHS = 100  # lines of the table of epochs
MACHINE = (
    "started", "hostname", "platform", "python", "cpu", "cpu_cores", "memory_gib", "gpus",
    "world_size", "num_nodes", "seed",
)  # fmt: skip
MAIN_PACKAGES = ("torch", "lightning", "hydra-core", "numpy", "samestep", "project")


class Node(NamedTuple):
    """One key of the configuration."""

    name: str
    value: str
    set_by: str
    """What has overridden it, such as ``the command line``; empty if nothing has."""
    children: tuple[Node, ...]


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
    write_text(path, render("report.html", **content_of(read_run(run_dir))))
    return path


def content_of(run: Run) -> dict[str, Any]:
    """What the page of a run shows, by the names of its template."""
    from samestep.report import charts

    curves = charts.curves_of(run.rows)
    epochs = run.num_epochs if run.status.state == record.FINISHED else None
    return {
        "title": run.name,
        "status": run.status,
        "problems": [redact(problem) for problem in run.problems],
        "facts": facts_of(run),
        "figures": {name: show(value) for name, value in sorted(run.figures.items())},
        "charts": [charts.draw(title, points, axis) for title, (axis, points) in curves.items()],
        "epochs": epochs_of(run),
        "predictions": read_predictions(run.run_dir),
        "choices": select(run.config, "choices") or {},
        "tree": tree_of(run.config, overridden_in(run)),
        "machine": machine_of(run),
        "packages": packages_of(run),
        "timeline": timeline(run),
        "command": summary.command_to_go_on(run.config, run.run_dir, epochs),
    }


def facts_of(run: Run) -> dict[str, str]:
    """The first things that a reader wants to know."""
    seconds = run.figures.get("time/total_s")
    times = {"training time": f"{seconds:,.1f} s"} if seconds else {}
    return summary.facts_of(run.config, run.figures, run.status, run.rows, times)


def epochs_of(run: Run) -> list[list[str]]:
    """The metrics of each epoch as a table, the heading first; the newest epochs of a long run."""
    rows = [row for row in run.rows if any(name.startswith(("train/", "val/")) for name in row)]
    names = sorted({name for row in rows for name in row if not name.startswith("test/")})
    names = [name for name in names if name not in ("epoch", "step")]
    if not rows:
        return []
    lines = [
        [f"{row.get('epoch', -1) + 1:.0f}", f"{row['step'] + 1:.0f}"]
        + [show(row[name]) if name in row else "" for name in names]
        for row in rows[-MAX_EPOCHS:]
    ]
    return [["epoch", "step", *names], *lines]


def machine_of(run: Run) -> dict[str, str]:
    """Machine, processes and code of the newest start."""
    facts = {name.replace("_", " "): words_of(run.status.start.get(name)) for name in MACHINE}
    git = run.status.start.get("git")
    if isinstance(git, dict):
        changed = ", with uncommitted changes (logs/git.diff)" if git.get("dirty") else ""
        facts["commit"] = f"{git.get('commit') or 'not known'}{changed}"
    return {name: text for name, text in facts.items() if text not in ("null", "[]")}


def packages_of(run: Run) -> dict[str, str]:
    """The versions of the installed packages, those that matter most first."""
    packages = run.status.packages
    names = [name for name in MAIN_PACKAGES if name in packages]
    return {name: packages[name] for name in dict.fromkeys([*names, *packages])}


def overridden_in(run: Run) -> dict[str, str]:
    """What the newest start has overridden, as ``compose.find_overridden`` returns it."""
    found = run.status.start.get("overridden")
    return {k: str(source) for k, source in found.items()} if isinstance(found, dict) else {}


def tree_of(node: Any, overridden: dict[str, str], path: str = "") -> tuple[Node, ...]:
    """A configuration as a tree; the choices of files are shown elsewhere."""
    if not isinstance(node, dict):
        return ()
    nodes = []
    for key, value in node.items():
        full = f"{path}.{key}" if path else str(key)
        if full != "choices":
            children = tree_of(value, overridden, full)
            text = "" if children else words_of(value)
            nodes.append(Node(str(key), text, overridden.get(full, ""), children))
    return tuple(nodes)


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
    """A page from a template. Every text is escaped, except for the SVG of our own charts."""
    return _environment().get_template(template).render(**content)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = FileSystemLoader(Path(__file__).parent / "templates")
    return Environment(loader=templates, autoescape=True, undefined=StrictUndefined,
                       trim_blocks=True, lstrip_blocks=True)  # fmt: skip
