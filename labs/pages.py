"""Tables that commands write into pages of the documentation, between two markers."""

from pathlib import Path

MARKERS = ("<!-- table -->\n", "<!-- end -->")


def read_table(page: str, markers: tuple[str, str] = MARKERS) -> str:
    """What is between the markers."""
    start, end = markers
    return page.partition(start)[2].partition(end)[0]


def write_table(path: Path, table: str, markers: tuple[str, str] = MARKERS) -> None:
    """Replace what is between the markers."""
    start, end = markers
    before, _, rest = path.read_text().partition(start)
    _, _, after = rest.partition(end)
    path.write_text(f"{before}{start}{table}{end}{after}")
