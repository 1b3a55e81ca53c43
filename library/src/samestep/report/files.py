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
from samestep.run import metrics, record
from samestep.run.changes import flatten, read_config

MAX_BYTES = 1_725_000  # of all pictures together: 2.3 MB on the page, which stays below 3 MB
MAX_TEXT = 20_000  # bytes of a table or text; longer ones are for programs
PICTURES = {".png", ".jpg", ".jpeg", ".svg", ".gif", ".webp"}


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
    found = metrics.read_figures(run_dir) or {}
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
    known = {name: math.nan if value is None else value for name, value in found.items()}
    figures = {name: value for name, value in known.items() if type(value) in (int, float)}
    return Run(run_dir, config, figures, rows, status, problems)


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


def read_predictions(run_dir: Path) -> list[Shown]:
    """Every picture, table and text in the predictions folder, in order of the names.

    A text file with the name of a picture, such as ``grid.txt`` beside ``grid.png``, describes it:
    its first line is the title, the others say what the picture shows.
    """
    paths = sorted(run_dir.glob("predictions/[!.]*"))
    described = {path.with_suffix(".txt") for path in paths if path.suffix in PICTURES}
    shown, left = [], MAX_BYTES
    for path in paths:
        title = path.stem.replace("_", " ").replace("-", " ").strip()
        title = title[:1].upper() + title[1:]
        is_picture = path.suffix in PICTURES
        if path in described or not (is_picture or path.suffix in (".csv", ".txt", ".md")):
            continue
        try:
            if path.stat().st_size > (left if is_picture else MAX_TEXT):
                raise ValueError("it is too large for this page")
            content = path.read_bytes()
            if is_picture:
                left -= len(content)
                about = path.with_suffix(".txt")
                text = about.read_text(errors="replace") if about.is_file() else ""
                title, _, text = (text.strip() or title).partition("\n")
                source = (
                    f"data:{mimetypes.guess_type(path)[0]};base64,{b64encode(content).decode()}"
                )
                shown.append(Shown(title, text or title, source))
            elif path.suffix == ".csv":
                lines = io.StringIO(content.decode(), newline="")
                shown.append(Shown(title, rows=list(csv.reader(lines))))
            else:
                shown.append(Shown(title, content.decode(errors="replace")))
        except (OSError, ValueError, csv.Error) as error:
            shown.append(Shown(title, f"{path.name}: {error}; open the file itself"))
    return shown
