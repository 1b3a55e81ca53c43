"""What a run directory holds, read with care: a damaged file is named, and left out."""

import csv
import io
import json
import math
import mimetypes
import os
from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from samestep.config_keys import KeyScope, scope_of
from samestep.errors import ConfigError
from samestep.ranks.secrets import redact
from samestep.run import metrics, record
from samestep.run.changes import flatten, read_config

MAX_BYTES = 1_725_000  # of all files together: 2.3 MB on the page, which stays below 3 MB
MAX_TEXT = 20_000  # bytes of a table or text; longer ones are for programs
PICTURES = (".png", ".jpg", ".jpeg", ".svg", ".gif", ".webp")
Stamp = tuple[int, int, int]  # of a file: when it was changed, its inode and its size


class Run(NamedTuple):
    """One run, as far as its files can be read."""

    run_dir: Path
    config: dict[str, Any]  # as saved; empty if it cannot be read
    final_metrics: dict[str, float]  # metrics.json; empty unless the run is finished now
    rows: metrics.Rows  # metrics.csv
    status: record.Record  # run.json: progress, starts and ends
    problems: list[str]  # what is missing or damaged, one sentence each

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.run_dir.absolute().name

    @property
    def values(self) -> dict[str, Any]:
        """The configuration by full keys, without names, paths and display options."""
        values = {}
        for key, value in flatten(self.config).items():
            if scope_of(key) < KeyScope.COSMETIC:
                values[key] = value
        return values


class PredictionFile(NamedTuple):
    """A file of the predictions folder, ready for the page."""

    title: str
    text: str = ""  # the description of a picture or table, or a text itself
    source: str = ""  # the content of a picture, as a ``data:`` address
    rows: Sequence[Sequence[str]] = ()  # the lines of a table, heading first
    matrix: Sequence[Sequence[str]] = ()  # the same of a table of numbers, which the page draws
    tiles: Sequence[tuple[str, str]] = ()  # small pictures, as ``data:`` addresses, and captions


def read_run(run_dir: Path) -> Run:
    """Read all that a report shows of a run, except for the predictions."""
    problems: list[str] = []
    config: dict[str, Any] = {}
    try:
        config = read_config(run_dir)
    except (ConfigError, OSError) as error:
        problems.append(f"config.yaml: {error}")
    status = record.read(run_dir)
    rows = metrics.read_history(run_dir)
    if why := metrics.why_damaged(run_dir):
        problems.append(f"metrics.csv is damaged: {why}")
    elif not rows:
        problems.append("metrics.csv holds no metric yet: there are no curves")
    final_metrics = metrics_if_finished(run_dir, status, problems)
    if not status.starts:
        problems.append("run.json is absent or damaged: machine, command and starts are unknown")
    # A damaged file may hold anything, and an error quotes its text.
    problems = [redact(problem) for problem in problems]
    return Run(run_dir, config, final_metrics, rows, status, problems)


def metrics_if_finished(
    run_dir: Path, status: record.Record, problems: list[str]
) -> dict[str, float]:
    """The final metrics of a run that is finished now; what is missing is added to ``problems``."""
    content = metrics.read_final_metrics(run_dir)
    if not content:
        problems.append("metrics.json is absent or damaged, so there are no final metrics")
        return {}
    # A run that was finished once and trains further keeps its old files until it ends again.
    if status.state != record.FINISHED:
        problems.append(
            "metrics.json and predictions are from before the run was resumed: "
            f"the run is {status.state}, so there are no final metrics"
        )
        return {}
    final = {}
    for name, value in content.items():
        # JSON has no nan: `samestep` writes null for it.
        if value is None:
            final[name] = math.nan
        elif isinstance(value, int | float):
            final[name] = value
    return final


def read_predictions(run_dir: Path) -> list[PredictionFile]:
    """Every picture, table and text in the predictions folder, sorted by name.

    A text beside a picture or table of the same name, such as ``grid.txt`` beside ``grid.csv``, is
    no file of its own: its first line is the title, the others say what there is to see.
    """
    paths = {*run_dir.glob("predictions/[!.]*")}
    drawn = [path for path in paths if path.suffix in (*PICTURES, ".csv")]
    beside = paths & {path.with_suffix(".txt") for path in drawn}
    files = []
    bytes_left = MAX_BYTES
    for path in sorted(paths - beside):
        if path.suffix not in READERS:
            continue
        title, text = path.name, ""
        if path.with_suffix(".txt") in beside:
            words = path.with_suffix(".txt").read_text(errors="replace")
            title, _, text = words.strip().partition("\n")
        too_large = f"{path.name} is too large for this page; open the file itself"
        file = PredictionFile(title, text=too_large)
        size = path.stat().st_size
        if size <= bytes_left:
            content = READERS[path.suffix](path)
            # The rows of a longer table are for programs; a matrix and tiles are drawn.
            if size <= MAX_TEXT or not content.keys() & {"text", "rows"}:
                bytes_left -= size
                file = PredictionFile(**{"title": title, "text": text} | content)
        files.append(file)
    return files


def read_picture(path: Path) -> dict[str, Any]:
    """A picture as a ``data:`` address."""
    content = b64encode(path.read_bytes()).decode()
    return {"source": f"data:{mimetypes.guess_type(path)[0]};base64,{content}"}


def read_table(path: Path) -> dict[str, Any]:
    """The rows of a table; of some the page draws a matrix of numbers, or small pictures.

    The first cell of a matrix names what its rows and columns are, such as ``truth / guess``. Small
    pictures have their ``data:`` addresses in a column ``picture``; the other columns are captions.
    """
    text = path.read_text(errors="replace")
    try:
        # Not text.splitlines(): a quoted cell may contain line breaks.
        heading, *rows = csv.reader(io.StringIO(text))
    # An empty file has no heading, and a cell may be longer than a reader accepts.
    except (ValueError, csv.Error):
        return {"text": text}
    if "picture" in heading:
        return {"tiles": find_tiles(text)}
    # A heading may be an empty line.
    if " / " in "".join(heading[:1]):
        return {"matrix": [heading, *rows]}
    return {"rows": [heading, *rows]}


def find_tiles(text: str) -> list[tuple[str, str]]:
    """The small pictures of a table with their captions."""
    tiles = []
    # A file that is being written has a last row without its end.
    for row in csv.DictReader(io.StringIO(text), restval=""):
        source = row.pop("picture")
        # Any other address would make the page ask a server.
        if source.startswith("data:"):
            tiles.append((source, ", ".join(map(" ".join, row.items()))))
    return tiles


def read_text(path: Path) -> dict[str, Any]:
    """A text as it is."""
    return {"text": path.read_text(errors="replace")}


READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    **dict.fromkeys(PICTURES, read_picture),
    ".csv": read_table,
    ".txt": read_text,
    ".md": read_text,
}
"""By the suffix of a file; what they return are fields of a ``PredictionFile``."""


def stamp_of(path: str | Path) -> Stamp:
    """What changes when a file is changed or replaced; zeros where there is none."""
    with suppress(OSError, ValueError):
        # Path.stat() would take twice as long, which counts with thousands of runs.
        status = os.stat(path)  # noqa: PTH116
        # A file that was replaced within one tick of the clock has another inode.
        return status.st_mtime_ns, status.st_ino, status.st_size
    return 0, 0, 0


def show(value: float) -> str:
    """A number with as many places as a reader can use."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.4g}".rstrip(".")


def show_value(value: Any) -> str:
    """A value of the configuration as in its YAML file."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str)
