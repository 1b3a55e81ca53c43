"""The table of labs/losses/results.md."""

import math
import re
from collections.abc import Iterable, Mapping
from functools import partial

from labs import pages
from labs.losses.program import ACCUMULATED, CUT, WHOLE, Job
from labs.losses.shapes.base import Shape
from labs.losses.verdict import EXACT, Verdict, worst

Row = Mapping[tuple[str, int], Verdict]

SAME = "The same on any number of ranks, as people write them, also with accumulated batches: "
HEADINGS = (
    "loss or layer (largest difference)",
    "2 and 3 ranks, as people write it",
    "with",
    "2 and 3 ranks",
    "accumulated",
    "cut",
)
NONE = "-"
MODES_OF_TABLE = (WHOLE, ACCUMULATED, CUT)


def render(verdicts: Mapping[Job, Row]) -> str:
    """Losses with the same cells share a line; those that are exact as they are follow."""
    mended = {job.shape.name: row for job, row in verdicts.items() if job.is_mended}
    groups: dict[tuple[str, ...], list[str]] = {}
    same = []
    for job, row in verdicts.items():
        if job.is_mended:
            continue
        shape = job.shape
        if worst(list(row.values())).word == EXACT:
            same.append(shape.name)
            continue
        written = worst(runs_of(row, WHOLE) + runs_of(row, ACCUMULATED))
        cells = [describe(written), NONE, NONE, NONE, cell_of(row, CUT)]
        if shape.remedy:
            other = mended[shape.name]
            cells[1:] = [shape.remedy, *map(partial(cell_of, other), MODES_OF_TABLE)]
        groups.setdefault(tuple(cells), []).append(f"{shape.name} ({show(written.difference)})")
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    for group, names in groups.items():
        lines.append(f"| {'; '.join(names)} | {' | '.join(group)} |")
    lines += ["", f"{SAME}{'; '.join(same)}.", ""]
    return "\n".join(lines)


def summarize(shapes: Iterable[Shape]) -> str:
    """What helps which losses, for docs/losses.md."""
    names_of: dict[str, list[str]] = {}
    for shape in shapes:
        if shape.remedy:
            names_of.setdefault(shape.remedy, []).append(shape.name)
    lines = ["| with | losses |", "|---|---|"]
    for remedy, names in names_of.items():
        lines.append(f"| {remedy} | {'; '.join(names)} |")
    return "\n".join([*lines, ""])


def runs_of(row: Row, mode: str) -> list[Verdict]:
    """The verdicts on the runs in this mode, on any number of ranks."""
    return [verdict for (of, _), verdict in row.items() if of == mode]


def cell_of(row: Row, mode: str) -> str:
    """The worst of the runs in a mode, if there are some."""
    runs = runs_of(row, mode)
    return describe(worst(runs)) if runs else NONE


def show(difference: float) -> str:
    """A difference with one digit."""
    # No number that is finite is infinitely far away, but a nan is.
    return "nan" if math.isinf(difference) else f"{difference:.1g}"


def describe(verdict: Verdict) -> str:
    """A verdict, and the notes that were printed."""
    notes = ", ".join(verdict.notes)
    return f"{verdict.word}: {notes}" if notes else verdict.word


def read_table(page: str) -> dict[str, list[str]]:
    """The cells of each loss of the page; those that are the same everywhere have one."""
    table = pages.read_table(page)
    _, *rows = re.findall(r"^\| (.*) \|$", table, re.M)  # the first row has the headings
    (same,) = re.findall(f"^{SAME}(.*).$", table, re.M)
    cells_of_loss = {name: [EXACT] for name in same.split("; ")}
    for row in rows:
        names, *cells = row.split(" | ")
        for name in names.split("; "):
            # Without the difference, in brackets at the end.
            cells_of_loss[name.rpartition(" (")[0]] = cells
    return cells_of_loss
