"""What a run directory holds, read with care: a file that is damaged is named, and left out."""

import csv
import io
import json
import math
import mimetypes
from base64 import b64encode
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from samestep.errors import ConfigError
from samestep.keys import Nature, nature_of
from samestep.ranks.secrets import redact
from samestep.run import metrics, record
from samestep.run.changes import flatten, read_config

MAX_BYTES = 1_725_000  # of all pictures together: 2.3 MB on the page, which stays below 3 MB
MAX_TEXT = 20_000  # bytes of a table or text; longer ones are for programs
PICTURES = (".png", ".jpg", ".jpeg", ".svg", ".gif", ".webp")
TEXTS = (".csv", ".txt", ".md")


class Run(NamedTuple):
    """One run, as far as its files can be read."""

    run_dir: Path
    config: dict[str, Any]  # as saved; empty if it cannot be read
    figures: dict[str, float]  # of metrics.json; empty unless the run is finished now
    rows: metrics.Rows  # of metrics.csv
    status: record.Record  # of run.json: how far the run is, its starts and ends
    problems: list[str]  # what is missing or damaged, one sentence each

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.run_dir.absolute().name

    @property
    def values(self) -> dict[str, Any]:
        """The configuration with full keys, without what only says how the run looks."""
        return {k: v for k, v in flatten(self.config).items() if nature_of(k) < Nature.LOOKS}


class Shown(NamedTuple):
    """A file of the predictions folder, ready for the page."""

    title: str
    text: str = ""  # of a picture its description
    source: str = ""  # of a picture: a ``data:`` address with its content
    rows: Sequence[Sequence[str]] = ()  # of a table: its lines, the heading first


def read_run(run_dir: Path) -> Run:
    """Read all that a report shows of a run, except for the predictions."""
    problems: list[str] = []
    config: dict[str, Any] = {}
    try:
        config = read_config(run_dir)
    except (ConfigError, OSError) as error:
        problems.append(f"config.yaml: {error}")
    status, rows = record.read(run_dir), metrics.read_history(run_dir)
    if why := metrics.why_damaged(run_dir):
        problems.append(f"metrics.csv is damaged: {why}")
    elif not rows:
        problems.append("metrics.csv holds no metric yet: there are no curves")
    found = metrics.read_final_metrics(run_dir) or {}
    if not found:
        problems.append("metrics.json is absent or damaged, so there are no final figures")
    elif status.state != record.FINISHED:
        found = {}
        problems.append(
            "metrics.json and predictions hold what the run had reached before it was continued: "
            f"the run is {status.state}, so there are no final figures"
        )
    if not status.starts:
        problems.append("run.json is absent or damaged: machine, command and starts are unknown")
    # JSON has no nan, so null stands for it; a damaged file may hold anything.
    figures = {
        name: math.nan if value is None else value
        for name, value in found.items()
        if isinstance(value, int | float | None)
    }
    return Run(run_dir, config, figures, rows, status, list(map(redact, problems)))


def read_predictions(run_dir: Path) -> list[Shown]:
    """Every picture, table and text in the predictions folder, in order of the names."""
    paths = sorted(run_dir.glob("predictions/[!.]*"))
    descriptions = {path.with_suffix(".txt") for path in paths if path.suffix in PICTURES}
    shown, left = [], MAX_BYTES
    for path in paths:
        size, is_picture = path.stat().st_size, path.suffix in PICTURES
        if path in descriptions or path.suffix not in (*PICTURES, *TEXTS):
            continue
        if size > (left if is_picture else MAX_TEXT):
            text = f"{path.name} is too large for this page; open the file itself"
            shown.append(Shown(path.name, text))
        elif is_picture:
            left -= size
            shown.append(read_picture(path))
        else:
            text = path.read_text(errors="replace")
            rows = list(csv.reader(io.StringIO(text))) if path.suffix == ".csv" else ()
            shown.append(Shown(path.name, text, rows=rows))
    return shown


def read_picture(path: Path) -> Shown:
    """A picture and the text file of the same name, such as ``grid.txt`` beside ``grid.png``.

    The first line of the text is the title, the others say what the picture shows.
    """
    about = path.with_suffix(".txt")
    text = about.read_text(errors="replace").strip() if about.exists() else path.name
    title, _, description = text.partition("\n")
    content = b64encode(path.read_bytes()).decode()
    source = f"data:{mimetypes.guess_type(path)[0]};base64,{content}"
    return Shown(title, description or title, source)


def show(value: float) -> str:
    """A figure with as many places as can be read."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".rstrip(".")


def show_value(value: Any) -> str:
    """A value of the configuration, as its YAML says it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def instant(text: Any) -> float:
    """A time as ISO 8601 in seconds since 1970; 0 if it is none."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return 0.0
