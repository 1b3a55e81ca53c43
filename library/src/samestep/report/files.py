"""What a run directory holds, read with care: a damaged file is named, and left out."""

import csv
import io
import json
import math
import mimetypes
import os
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from samestep.config_keys import KeyScope, scope_of
from samestep.errors import ConfigError
from samestep.ranks.secrets import redact
from samestep.run import metrics, record
from samestep.run.changes import flatten, read_config

MAX_BYTES = 1_725_000  # of all pictures together: 2.3 MB on the page, which stays below 3 MB
MAX_TEXT = 20_000  # bytes of a table or text; longer ones are for programs
PICTURES = (".png", ".jpg", ".jpeg", ".svg", ".gif", ".webp")
TEXTS = (".csv", ".txt", ".md")
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
    text: str = ""  # its text, or the description of a picture
    source: str = ""  # the content of a picture, as a ``data:`` address
    rows: Sequence[Sequence[str]] = ()  # the lines of a table, heading first
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
    """Every picture, table and text in the predictions folder, sorted by name."""
    paths = sorted(run_dir.glob("predictions/[!.]*"))
    beside = find_files_beside(paths)
    files = []
    bytes_left = MAX_BYTES
    for path in paths:
        # What stands beside a picture is shown with the picture, not a second time on its own.
        if path in beside:
            continue
        size = path.stat().st_size
        if path.with_suffix(".csv") in beside:
            # The page may contain both.
            size += path.with_suffix(".csv").stat().st_size
        if path.suffix in PICTURES and size <= bytes_left:
            bytes_left -= size
            files.append(read_picture(path))
        elif path.suffix in TEXTS and size <= MAX_TEXT:
            files.append(read_table_or_text(path))
        elif path.suffix in (*PICTURES, *TEXTS):
            text = f"{path.name} is too large for this page; open the file itself"
            files.append(PredictionFile(path.name, text))
    return files


def find_files_beside(paths: Sequence[Path]) -> set[Path]:
    """The text of each picture, and its table if the page can draw that instead of the picture."""
    beside = set()
    for path in paths:
        if path.suffix in PICTURES:
            beside.add(path.with_suffix(".txt"))
            table = path.with_suffix(".csv")
            if table in paths and read_drawing(table):
                beside.add(table)
    return beside


def read_picture(path: Path) -> PredictionFile:
    """A picture and the files of the same name, such as ``grid.txt`` beside ``grid.png``.

    The first line of the text is the title, the others say what the picture shows. From a table the
    page draws the picture itself, see ``read_drawing``.
    """
    text_path, table_path = path.with_suffix(".txt"), path.with_suffix(".csv")
    text = path.name
    if text_path.exists():
        text = text_path.read_text(errors="replace").strip()
    title, _, description = text.partition("\n")
    content = b64encode(path.read_bytes()).decode()
    source = f"data:{mimetypes.guess_type(path)[0]};base64,{content}"
    # A screen reader needs a description, if only the title.
    picture = PredictionFile(title, description or title, source)
    if table_path.exists():
        return picture._replace(**read_drawing(table_path))
    return picture


def read_drawing(path: Path) -> dict[str, Any]:
    """What the page draws from a table: a matrix of numbers, or small pictures; empty for others.

    A matrix has names in its first row and column, and numbers elsewhere. Small pictures have their
    ``data:`` addresses in a column ``picture``, and the other columns are their captions.
    """
    if path.stat().st_size > MAX_BYTES:
        return {}
    try:
        heading, *rows = csv.reader(io.StringIO(path.read_text(errors="replace")))
    # An empty file has no heading, and a cell may be longer than a reader accepts.
    except (ValueError, csv.Error):
        return {}
    whole = []
    numbers = []
    for row in rows:
        # A file that is being written has a last row without its end.
        if len(row) == len(heading):
            whole.append(row)
            numbers += row[1:]
    if "picture" in heading:
        return find_tiles(heading, whole)
    if numbers and all(map(str.isdecimal, numbers)):
        return {"rows": [heading, *whole]}
    return {}


def find_tiles(heading: list[str], rows: Sequence[list[str]]) -> dict[str, Any]:
    """The small pictures of a table with their captions, instead of the large picture."""
    column = heading.index("picture")
    tiles = []
    for row in rows:
        words = []
        for name, cell in zip(heading, row, strict=True):
            if name != "picture":
                words.append(f"{name} {cell}")
        # Any other address would make the page ask a server.
        if row[column].startswith("data:"):
            tiles.append((row[column], ", ".join(words)))
    return {"tiles": tiles, "source": ""} if tiles else {}


def read_table_or_text(path: Path) -> PredictionFile:
    """A text file; a CSV file has rows too."""
    text = path.read_text(errors="replace")
    rows: list[list[str]] = []
    if path.suffix == ".csv":
        # Not text.splitlines(): a quoted cell may contain line breaks.
        rows = list(csv.reader(io.StringIO(text)))
    return PredictionFile(path.name, text, rows=rows)


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
