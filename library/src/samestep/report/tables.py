"""Tables of estimates, for a terminal, a page or a program."""

import sys
from typing import Any

from samestep.report.estimates import Estimate

# On a terminal.
STYLES = {"": "", "highest": "bold", "lowest": "bold", "better": "green", "worse": "red"}


class Cell(str):
    """A text of a table, and the estimate that it shows, if it shows one."""

    estimate: Estimate | None = None
    mark = ""
    """``highest`` or ``lowest`` of its row, or ``better`` or ``worse`` than the first group."""

    @classmethod
    def of(cls, estimate: Estimate | None, *, is_difference: bool = False) -> "Cell":
        """The cell of an estimate; empty without one."""
        if estimate is None:
            return cls()
        cell = cls(estimate.text(is_difference=is_difference))
        cell.estimate = estimate
        return cell

    def with_mark(self) -> str:
        """The text, and the mark as a word: colours are lost in a pipe and for some readers."""
        if not self.mark:
            return self
        return f"{self} ({self.mark})"

    def plain(self) -> Any:
        """The numbers of the estimate; without one, the text."""
        if self.estimate is None:
            return self
        return self.estimate._asdict()


Tables = dict[str, list[list[Cell]]]
"""The tables of a comparison by their titles; the first row of each is its heading."""


def as_json(tables: Tables) -> dict[str, dict[str, list[Any]]]:
    """The rows of each table by their names, headings as ``columns``, estimates as numbers."""
    plain: dict[str, dict[str, list[Any]]] = {}
    for title, rows in tables.items():
        plain[title] = {}
        for key, *cells in rows:
            plain[title][key or "columns"] = [cell.plain() for cell in cells]
    return plain


def print_tables(tables: Tables) -> None:
    """Print the tables for a terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A file or a pipe has no width; lines must not be broken there.
    width = None if sys.stdout.isatty() else 1000
    console = Console(file=sys.stdout, width=width, highlight=False)
    for title, (heading, *rows) in tables.items():
        table = Table(box=box.SIMPLE, title=title, title_justify="left")
        for name in heading:
            table.add_column(Text(name), overflow="fold")
        for row in rows:
            # As Text, because rich would read a name such as [b]mine as markup.
            table.add_row(*[Text(cell.with_mark(), STYLES[cell.mark]) for cell in row])
        console.print(table)
